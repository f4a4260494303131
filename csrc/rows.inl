// What happens to rows between matrices: norm, activation, rotation. Lanes run along the row.

namespace outrider {
namespace {

constexpr std::size_t kTaskFloats = 16384;

// e^x, x <= 88: 2^n times a polynomial in the rest, relative error below 2e-7; 0 below -87.
inline Vec::F exponential(Vec::F x) {
  const Vec::F magic = Vec::all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const Vec::F bounded = Vec::max(x, Vec::all(-87.0f));
  const Vec::F n = Vec::fma(bounded, Vec::all(1.44269504f), magic) - magic;
  Vec::F rest = Vec::fma(n, Vec::all(-0.693359375f), bounded);
  rest = Vec::fma(n, Vec::all(2.12194440e-4f), rest);
  Vec::F sum = Vec::all(1.3888889e-3f);
  sum = Vec::fma(sum, rest, Vec::all(8.3333333e-3f));
  sum = Vec::fma(sum, rest, Vec::all(4.1666667e-2f));
  sum = Vec::fma(sum, rest, Vec::all(1.6666667e-1f));
  sum = Vec::fma(sum, rest, Vec::all(0.5f));
  sum = Vec::fma(sum, rest, Vec::all(1.0f));
  sum = Vec::fma(sum, rest, Vec::all(1.0f));
  return sum * Vec::power_of_two(n);
}

inline float exponential(float x) {
  float lanes[Vec::kLanes];
  Vec::store(lanes, exponential(Vec::all(x)));
  return lanes[0];
}

inline std::size_t rows_a_task(std::size_t width) { return kTaskFloats / width + 1; }

struct NormJob {
  float* x;
  const float* delta;
  const float* weight;
  float* out;
  std::size_t rows, k, each;
  float eps;
};

void norm_row(const NormJob& job, std::size_t row) {
  float* x = job.x + row * job.k;
  float* out = job.out + row * job.k;
  const std::size_t whole = job.k / Vec::kLanes * Vec::kLanes;
  if (job.delta) {
    const float* delta = job.delta + row * job.k;
    for (std::size_t i = 0; i < whole; i += Vec::kLanes) Vec::store(x + i, Vec::load(x + i) + Vec::load(delta + i));
    for (std::size_t i = whole; i < job.k; ++i) x[i] += delta[i];
  }
  Vec::F squares = Vec::all(0.0f);
  for (std::size_t i = 0; i < whole; i += Vec::kLanes) squares = Vec::fma(Vec::load(x + i), Vec::load(x + i), squares);
  float total = Vec::sum(squares);
  for (std::size_t i = whole; i < job.k; ++i) total += x[i] * x[i];
  const float scale = 1.0f / __builtin_sqrtf(total / static_cast<float>(job.k) + job.eps);
  const Vec::F scales = Vec::all(scale);
  for (std::size_t i = 0; i < whole; i += Vec::kLanes)
    Vec::store(out + i, Vec::load(x + i) * scales * Vec::load(job.weight + i));
  for (std::size_t i = whole; i < job.k; ++i) out[i] = x[i] * scale * job.weight[i];
}

void norm_task(const void* job_pointer, std::size_t index) {
  const NormJob& job = *static_cast<const NormJob*>(job_pointer);
  const std::size_t last = (index + 1) * job.each < job.rows ? (index + 1) * job.each : job.rows;
  for (std::size_t row = index * job.each; row < last; ++row) norm_row(job, row);
}

void rms_norm(float* x, const float* delta, const float* weight, float* out, std::size_t rows, std::size_t k, float eps) {
  const NormJob job{x, delta, weight, out, rows, k, rows_a_task(k), eps};
  run_tasks((rows + job.each - 1) / job.each, norm_task, &job);
}

struct SwigluJob {
  const float* gate_up;
  float* out;
  std::size_t rows, width, each;
};

inline Vec::F gated(Vec::F gate, Vec::F up) {
  const Vec::F one = Vec::all(1.0f);
  const Vec::F minus = Vec::all(0.0f) - Vec::max(gate, Vec::all(-87.0f));
  return gate / (one + exponential(minus)) * up;
}

void swiglu_row(const float* gate, const float* up, float* out, std::size_t width) {
  const std::size_t whole = width / Vec::kLanes * Vec::kLanes;
  for (std::size_t i = 0; i < whole; i += Vec::kLanes) Vec::store(out + i, gated(Vec::load(gate + i), Vec::load(up + i)));
  for (std::size_t i = whole; i < width; ++i) {
    float lanes[Vec::kLanes];
    Vec::store(lanes, gated(Vec::all(gate[i]), Vec::all(up[i])));
    out[i] = lanes[0];
  }
}

void swiglu_task(const void* job_pointer, std::size_t index) {
  const SwigluJob& job = *static_cast<const SwigluJob*>(job_pointer);
  const std::size_t last = (index + 1) * job.each < job.rows ? (index + 1) * job.each : job.rows;
  for (std::size_t row = index * job.each; row < last; ++row) {
    const float* gate = job.gate_up + row * 2 * job.width;
    swiglu_row(gate, gate + job.width, job.out + row * job.width, job.width);
  }
}

void swiglu(const float* gate_up, float* out, std::size_t rows, std::size_t width) {
  const SwigluJob job{gate_up, out, rows, width, rows_a_task(4 * width)};
  run_tasks((rows + job.each - 1) / job.each, swiglu_task, &job);
}

struct RopeJob {
  float* x;
  const float* cos;
  const float* sin;
  const std::int64_t* positions;
  std::size_t rows, step, heads, width, each;
};

void rope_row(const RopeJob& job, std::size_t row) {
  const std::size_t half = job.width / 2;
  const std::size_t whole = half / Vec::kLanes * Vec::kLanes;
  const float* cos = job.cos + static_cast<std::size_t>(job.positions[row]) * half;
  const float* sin = job.sin + static_cast<std::size_t>(job.positions[row]) * half;
  for (std::size_t head = 0; head < job.heads; ++head) {
    float* low = job.x + row * job.step + head * job.width;
    float* high = low + half;
    for (std::size_t i = 0; i < whole; i += Vec::kLanes) {
      const Vec::F a = Vec::load(low + i), b = Vec::load(high + i), c = Vec::load(cos + i), s = Vec::load(sin + i);
      Vec::store(low + i, a * c - b * s);
      Vec::store(high + i, b * c + a * s);
    }
    for (std::size_t i = whole; i < half; ++i) {
      const float a = low[i], b = high[i];
      low[i] = a * cos[i] - b * sin[i];
      high[i] = b * cos[i] + a * sin[i];
    }
  }
}

void rope_task(const void* job_pointer, std::size_t index) {
  const RopeJob& job = *static_cast<const RopeJob*>(job_pointer);
  const std::size_t last = (index + 1) * job.each < job.rows ? (index + 1) * job.each : job.rows;
  for (std::size_t row = index * job.each; row < last; ++row) rope_row(job, row);
}

void rope(float* x, const float* cos, const float* sin, const std::int64_t* positions, std::size_t rows, std::size_t step,
          std::size_t heads, std::size_t width) {
  const RopeJob job{x, cos, sin, positions, rows, step, heads, width, rows_a_task(heads * width)};
  run_tasks((rows + job.each - 1) / job.each, rope_task, &job);
}

}  // namespace
}  // namespace outrider
