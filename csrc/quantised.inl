// Quantised linear layers: exact integer products of weight codes and 8-bit activations within a group, float32 across
// groups, one chain of multiply-adds in the order of the inputs for each output. Layout: quantised.h.

namespace outrider {
namespace {

constexpr std::size_t kQuantRows = 6;             // rows that share an unpacked code
constexpr std::size_t kQuantStreamRows = 2 * kQuantRows + 4;
constexpr std::size_t kQuantCacheRows = 96;
constexpr std::size_t kQuantGroupPanels = 16;
constexpr std::size_t kQuantTaskWeights = 32768;
constexpr std::size_t kQuantAhead = 1536;         // bytes
constexpr std::size_t kQuantiseTaskFloats = 16384;
constexpr std::size_t kVectorBytes = 4 * Vec::kLanes;

// Activations: for each row k codes in [-127, 127], and for each group of 32 a scale, sums of codes, and scale x sum.
struct Activations {
  const std::int8_t* codes;
  const float* scales;
  const float* scaled_sums;
  const std::int32_t* sums;       // of groups of 32
  const std::int32_t* half_sums;  // of groups of 16
};

// The codes of a group. `quad` unpacks four inputs of each column.

// How many quads the level's accumulator takes before it must be emptied into 32 bits: quads * 2 * 127 * largest code < 2^15.
constexpr int flush_after(int quads) { return Vec::kWideDots ? 8 : quads; }

struct Nibbles {
  static constexpr std::size_t kBytes = 4 * kVectorBytes;
  static constexpr int kFlush = flush_after(8);
  template <int Quad>
  static Vec::B quad(const std::uint8_t* codes) {
    const Vec::B both = Vec::bytes(codes + Quad / 2 * kVectorBytes);
    return Quad % 2 ? Vec::high_nibbles(both) : Vec::low_nibbles(both);
  }
};

struct FiveBits {
  static constexpr std::size_t kBytes = 5 * kVectorBytes;
  static constexpr int kFlush = flush_after(4);
  template <int Quad>
  static Vec::B quad(const std::uint8_t* codes) {
    const Vec::B bits = Vec::bytes(codes + 4 * kVectorBytes);
    return Vec::either(Nibbles::quad<Quad>(codes), Vec::template move_bits<4 - Quad>(bits, 0x10));
  }
};

struct SixBits {
  static constexpr std::size_t kBytes = 6 * kVectorBytes;
  static constexpr int kFlush = flush_after(2);
  template <int Quad>
  static Vec::B quad(const std::uint8_t* codes) {
    const Vec::B bits = Vec::bytes(codes + (4 + Quad / 4) * kVectorBytes);
    return Vec::either(Nibbles::quad<Quad>(codes), Vec::template move_bits<4 - Quad % 4 * 2>(bits, 0x30));
  }
};

struct EightBits {
  static constexpr std::size_t kBytes = 8 * kVectorBytes;
  static constexpr int kFlush = 0;  // see byte_dots
};

template <class Code, int R, int Quad>
inline void add_quad(const std::uint8_t* codes, const std::int8_t* x, std::size_t step, Vec::A* sums) {
  const Vec::B weights = Code::template quad<Quad>(codes);
  for (int r = 0; r < R; ++r) sums[r] = Vec::dot(sums[r], weights, Vec::quad(x + r * step + 4 * Quad));
}

template <class Code, int R, int Quad, int Count>
inline void add_quads(const std::uint8_t* codes, const std::int8_t* x, std::size_t step, Vec::A* sums) {
  add_quad<Code, R, Quad>(codes, x, step, sums);
  if constexpr (Count > 1) add_quads<Code, R, Quad + 1, Count - 1>(codes, x, step, sums);
}

// Products of quads [Quad, Quad + Count).
template <class Code, int R, int Quad, int Count>
inline void dots(const std::uint8_t* codes, const std::int8_t* x, std::size_t step, Vec::I* total) {
  constexpr int now = Count < Code::kFlush ? Count : Code::kFlush;
  Vec::A sums[R];
  for (int r = 0; r < R; ++r) sums[r] = Vec::no_dots();
  add_quads<Code, R, Quad, now>(codes, x, step, sums);
  for (int r = 0; r < R; ++r) total[r] = Vec::plus(total[r], Vec::emptied(sums[r]));
  if constexpr (Count > now) dots<Code, R, Quad + now, Count - now>(codes, x, step, total);
}

// Eight-bit codes are two nibbles where the accumulator is narrow.
template <int R>
inline void byte_dots(const std::uint8_t* codes, const std::int8_t* x, std::size_t step, Vec::I* total) {
  Vec::A low[R], high[R];
  for (int r = 0; r < R; ++r) low[r] = high[r] = Vec::no_dots();
  for (int quad = 0; quad < 8; ++quad) {
    const Vec::B weights = Vec::bytes(codes + quad * kVectorBytes);
    for (int r = 0; r < R; ++r) {
      const Vec::B value = Vec::quad(x + r * step + 4 * quad);
      if (Vec::kWideDots) {
        low[r] = Vec::dot(low[r], weights, value);
      } else {
        low[r] = Vec::dot(low[r], Vec::low_nibbles(weights), value);
        high[r] = Vec::dot(high[r], Vec::high_nibbles(weights), value);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    total[r] = Vec::plus(total[r], Vec::emptied(low[r]));
    if (!Vec::kWideDots) total[r] = Vec::plus(total[r], Vec::times_sixteen(Vec::emptied(high[r])));
  }
}

// The scales: a group has kParts parts of equal length with a scale each; a weight is scale x (code - kZero) + offset.

template <int Zero>
struct PlainScale {
  static constexpr std::size_t kGroups = 1, kHeadBytes = 0, kGroupBytes = 2 * Vec::kLanes;
  static constexpr int kParts = 1, kZero = Zero;
  static constexpr bool kOffset = false;
  explicit PlainScale(const std::uint8_t*) {}
  Vec::F scale(const std::uint8_t* at, int) const { return Vec::halves(at); }
  Vec::F offset(const std::uint8_t*) const { return Vec::all(0.0f); }
};

struct ScaleAndOffset {
  static constexpr std::size_t kGroups = 1, kHeadBytes = 0, kGroupBytes = 4 * Vec::kLanes;
  static constexpr int kParts = 1, kZero = 0;
  static constexpr bool kOffset = true;
  explicit ScaleAndOffset(const std::uint8_t*) {}
  Vec::F scale(const std::uint8_t* at, int) const { return Vec::halves(at); }
  Vec::F offset(const std::uint8_t* at) const { return Vec::halves(at + 2 * Vec::kLanes); }
};

struct NestedScaleAndMinimum {
  static constexpr std::size_t kGroups = 8, kHeadBytes = 4 * Vec::kLanes, kGroupBytes = 2 * Vec::kLanes;
  static constexpr int kParts = 1, kZero = 0;
  static constexpr bool kOffset = true;
  Vec::F unit, minus_minimum;
  explicit NestedScaleAndMinimum(const std::uint8_t* head)
      : unit(Vec::halves(head)), minus_minimum(Vec::all(0.0f) - Vec::halves(head + 2 * Vec::kLanes)) {}
  Vec::F scale(const std::uint8_t* at, int) const { return unit * Vec::unsigned_bytes(at); }
  Vec::F offset(const std::uint8_t* at) const { return minus_minimum * Vec::unsigned_bytes(at + Vec::kLanes); }
};

struct NestedHalfScales {
  static constexpr std::size_t kGroups = 8, kHeadBytes = 2 * Vec::kLanes, kGroupBytes = 2 * Vec::kLanes;
  static constexpr int kParts = 2, kZero = 32;
  static constexpr bool kOffset = false;
  Vec::F unit;
  explicit NestedHalfScales(const std::uint8_t* head) : unit(Vec::halves(head)) {}
  Vec::F scale(const std::uint8_t* at, int part) const { return unit * Vec::signed_bytes(at + part * Vec::kLanes); }
  Vec::F offset(const std::uint8_t*) const { return Vec::all(0.0f); }
};

template <class Code, class Scale, int R, int Part>
inline void add_part(const Scale& scales, const std::uint8_t* group, const Activations& x, std::size_t g, std::size_t k, Vec::F* sum) {
  constexpr int quads = 8 / Scale::kParts;
  const std::uint8_t* codes = group + Scale::kGroupBytes;
  Vec::I total[R];
  for (int r = 0; r < R; ++r) total[r] = Vec::whole(0);
  if constexpr (Code::kFlush == 0) {
    byte_dots<R>(codes, x.codes + 32 * g, k, total);
  } else {
    dots<Code, R, Part * quads, quads>(codes, x.codes + 32 * g, k, total);
  }
  const Vec::F scale = scales.scale(group, Part);
  for (int r = 0; r < R; ++r) {
    if (Scale::kZero) {
      const std::int32_t codes_sum =
          Scale::kParts == 1 ? x.sums[r * (k / 32) + g] : x.half_sums[r * (k / 16) + 2 * g + Part];
      total[r] = Vec::minus(total[r], Vec::whole(Scale::kZero * codes_sum));
    }
    const Vec::F unit = scale * Vec::all(x.scales[r * (k / 32) + g]);
    sum[r] = Vec::fma(Vec::floats(total[r]), unit, sum[r]);
  }
  if constexpr (Part + 1 < Scale::kParts) add_part<Code, Scale, R, Part + 1>(scales, group, x, g, k, sum);
}

// R rows of one panel: out[r * kLanes ..] = the panel's columns.
template <class Code, class Scale, int R>
void quant_tile(const std::uint8_t* w, const Activations& x, std::size_t k, std::size_t ahead, float* out) {
  Vec::F sum[R];
  for (int r = 0; r < R; ++r) sum[r] = Vec::all(0.0f);
  for (std::size_t g = 0; g < k / 32;) {
    const Scale scales(w);
    w += Scale::kHeadBytes;
    for (std::size_t inner = 0; inner < Scale::kGroups; ++inner, ++g) {
      for (std::size_t line = 0; line < Scale::kGroupBytes + Code::kBytes; line += 64) __builtin_prefetch(w + ahead + line);
      add_part<Code, Scale, R, 0>(scales, w, x, g, k, sum);
      if (Scale::kOffset) {
        const Vec::F offset = scales.offset(w);
        for (int r = 0; r < R; ++r) sum[r] = Vec::fma(offset, Vec::all(x.scaled_sums[r * (k / 32) + g]), sum[r]);
      }
      w += Scale::kGroupBytes + Code::kBytes;
    }
  }
  for (int r = 0; r < R; ++r) Vec::store(out + r * Vec::kLanes, sum[r]);
}

template <class Code, class Scale>
void quant_tile_of(std::size_t rows, const std::uint8_t* w, const Activations& x, std::size_t k, std::size_t ahead, float* out) {
  switch (rows) {
    case 1: return quant_tile<Code, Scale, 1>(w, x, k, ahead, out);
    case 2: return quant_tile<Code, Scale, 2>(w, x, k, ahead, out);
    case 3: return quant_tile<Code, Scale, 3>(w, x, k, ahead, out);
    case 4: return quant_tile<Code, Scale, 4>(w, x, k, ahead, out);
    case 5: return quant_tile<Code, Scale, 5>(w, x, k, ahead, out);
    default: return quant_tile<Code, Scale, 6>(w, x, k, ahead, out);
  }
}

struct QuantTasks {
  const QuantLinearJob& job;
  Activations x;
  std::size_t panels, each, panel_bytes;
  void (*tile_of)(std::size_t, const std::uint8_t*, const Activations&, std::size_t, std::size_t, float*);
};

void quant_panel_rows(const QuantTasks& tasks, std::size_t panel, std::size_t row, std::size_t rows, std::size_t ahead) {
  const QuantLinearJob& job = tasks.job;
  const std::size_t k = job.k, column = panel * Vec::kLanes;
  const std::size_t columns = job.n - column < Vec::kLanes ? job.n - column : Vec::kLanes;
  const Activations x{tasks.x.codes + row * k, tasks.x.scales + row * (k / 32), tasks.x.scaled_sums + row * (k / 32),
                      tasks.x.sums + row * (k / 32), tasks.x.half_sums + row * (k / 16)};
  alignas(64) float out[kQuantRows * Vec::kLanes];
  tasks.tile_of(rows, job.packed + panel * tasks.panel_bytes, x, k, ahead, out);
  for (std::size_t r = 0; r < rows; ++r) {
    float* y = job.y + (row + r) * job.n + column;
    for (std::size_t j = 0; j < columns; ++j) y[j] = out[r * Vec::kLanes + j] + (job.bias ? job.bias[column + j] : 0.0f);
  }
}

void quant_task(const void* tasks_pointer, std::size_t index) {
  const QuantTasks& tasks = *static_cast<const QuantTasks*>(tasks_pointer);
  const std::size_t first = index * tasks.each, rows = tasks.job.rows;
  const std::size_t last = first + tasks.each < tasks.panels ? first + tasks.each : tasks.panels;
  const std::size_t ahead = rows <= kQuantStreamRows ? kQuantAhead : 0;
  for (std::size_t m0 = 0; m0 < rows; m0 += kQuantCacheRows) {
    const std::size_t m1 = m0 + kQuantCacheRows < rows ? m0 + kQuantCacheRows : rows;
    const std::size_t blocks = (m1 - m0 + kQuantRows - 1) / kQuantRows;
    for (std::size_t panel = first; panel < last; ++panel)
      for (std::size_t b = 0; b < blocks; ++b) {
        const std::size_t row = m0 + (m1 - m0) * b / blocks;
        quant_panel_rows(tasks, panel, row, m0 + (m1 - m0) * (b + 1) / blocks - row, b == 0 ? ahead : 0);
      }
  }
}

struct QuantiseJob {
  const float* x;
  std::int8_t* codes;
  float* scales;
  float* scaled_sums;
  std::int32_t* sums;
  std::int32_t* half_sums;
  std::size_t rows, k, each;
};

// Codes of 32 numbers: round(x 127 / largest); not a number anywhere makes the scale not a number.
void quantise_group(const QuantiseJob& job, std::size_t group) {
  const float* x = job.x + 32 * group;
  Vec::F most = Vec::all(0.0f), poison = Vec::all(0.0f);
  for (std::size_t i = 0; i < 32; i += Vec::kLanes) {
    const Vec::F value = Vec::load(x + i);
    most = Vec::max(Vec::max(value, Vec::all(0.0f) - value), most);
    poison = Vec::fma(value, Vec::all(0.0f), poison);
  }
  const float largest = Vec::largest(most);
  const Vec::F inverse = Vec::all(largest > 0.0f ? 127.0f / largest : 0.0f);
  const Vec::F magic = Vec::all(12582912.0f);
  float rounded[32];
  for (std::size_t i = 0; i < 32; i += Vec::kLanes) Vec::store(rounded + i, Vec::load(x + i) * inverse + magic - magic);
  std::int32_t halves[2] = {0, 0};
  for (std::size_t i = 0; i < 32; ++i) {
    const std::int32_t code = static_cast<std::int32_t>(rounded[i]);
    job.codes[32 * group + i] = static_cast<std::int8_t>(code);
    halves[i / 16] += static_cast<std::int8_t>(code);
  }
  const float scale = largest / 127.0f + Vec::sum(poison);
  job.scales[group] = scale;
  job.half_sums[2 * group] = halves[0];
  job.half_sums[2 * group + 1] = halves[1];
  job.sums[group] = halves[0] + halves[1];
  job.scaled_sums[group] = scale * static_cast<float>(halves[0] + halves[1]);
}

void quantise_task(const void* job_pointer, std::size_t index) {
  const QuantiseJob& job = *static_cast<const QuantiseJob*>(job_pointer);
  const std::size_t groups = job.rows * (job.k / 32);
  const std::size_t last = (index + 1) * job.each < groups ? (index + 1) * job.each : groups;
  for (std::size_t group = index * job.each; group < last; ++group) quantise_group(job, group);
}

Activations quantise(const QuantLinearJob& job) {
  const std::size_t groups = job.rows * (job.k / 32);
  float* memory = static_cast<float*>(Scratch::of_thread().room(0, groups * (32 + 5 * sizeof(float))));
  std::int32_t* sums = reinterpret_cast<std::int32_t*>(memory + 2 * groups);
  std::int8_t* codes = reinterpret_cast<std::int8_t*>(sums + 3 * groups);
  const QuantiseJob made{job.x, codes, memory, memory + groups, sums, sums + groups, job.rows, job.k, kQuantiseTaskFloats / 32};
  run_tasks((groups + made.each - 1) / made.each, quantise_task, &made);
  return Activations{codes, made.scales, made.scaled_sums, made.sums, made.half_sums};
}

void quant_linear(const QuantLinearJob& job) {
  const Activations x = quantise(job);
  QuantTasks tasks{job, x, (job.n + Vec::kLanes - 1) / Vec::kLanes, 0, job.panel_bytes, nullptr};
  switch (job.type) {
    case GgmlType::kQ4_0: tasks.tile_of = quant_tile_of<Nibbles, PlainScale<8>>; break;
    case GgmlType::kQ4_1: tasks.tile_of = quant_tile_of<Nibbles, ScaleAndOffset>; break;
    case GgmlType::kQ5_0: tasks.tile_of = quant_tile_of<FiveBits, PlainScale<16>>; break;
    case GgmlType::kQ5_1: tasks.tile_of = quant_tile_of<FiveBits, ScaleAndOffset>; break;
    case GgmlType::kQ8_0: tasks.tile_of = quant_tile_of<EightBits, PlainScale<128>>; break;
    case GgmlType::kQ4_K: tasks.tile_of = quant_tile_of<Nibbles, NestedScaleAndMinimum>; break;
    case GgmlType::kQ5_K: tasks.tile_of = quant_tile_of<FiveBits, NestedScaleAndMinimum>; break;
    case GgmlType::kQ6_K: tasks.tile_of = quant_tile_of<SixBits, NestedHalfScales>; break;
  }
  tasks.each = kQuantTaskWeights / (job.k * Vec::kLanes) + 1;
  if (job.rows > kQuantStreamRows) tasks.each = kQuantGroupPanels;
  run_tasks((tasks.panels + tasks.each - 1) / tasks.each, quant_task, &tasks);
}

}  // namespace
}  // namespace outrider
