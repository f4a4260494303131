// Float weights as Q4_0 blocks, as files have them: for a draft, whose weights decide its speed and never the result.
//
// A block of 32 is d (code - 8). Of several first guesses at d, the plain one first, the one is kept whose codes explain most
// of the block's energy, and d is then its least-squares fit to those codes.

namespace outrider {
namespace {

constexpr std::size_t kEncodeBlocks = 1024;  // of a task
constexpr float kGuesses[] = {8.0f, 7.7f, 8.3f, 7.4f, 8.6f};  // steps to the largest weight
constexpr float kLargestHalf = 65504.0f;
constexpr float kMargin = 1.00001f;                           // by which a later guess must be better: more than rounding

struct Fit {
  float product, energy;  // sums of weight x code and of code^2, codes in [-8, 7]

  float explained() const { return energy > 0.0f ? product * product / energy : 0.0f; }
};

inline Vec::F codes_of(const float* x, Vec::F inverse) {
  const Vec::F magic = Vec::all(12582912.0f), zero = Vec::all(0.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const Vec::F code = Vec::load(x) * inverse + magic - magic;
  return zero - Vec::max(zero - Vec::max(code, Vec::all(-8.0f)), Vec::all(-7.0f));
}

inline Fit fit(const float* x, float inverse) {
  Vec::F product = Vec::all(0.0f), energy = Vec::all(0.0f);
  for (std::size_t i = 0; i < 32; i += Vec::kLanes) {
    const Vec::F code = codes_of(x + i, Vec::all(inverse));
    product = Vec::fma(Vec::load(x + i), code, product);
    energy = Vec::fma(code, code, energy);
  }
  return Fit{Vec::sum(product), Vec::sum(energy)};
}

// 0, or not a number where a weight is not finite.
inline float poison(const float* x) {
  Vec::F sum = Vec::all(0.0f);
  for (std::size_t i = 0; i < 32; i += Vec::kLanes) sum = Vec::fma(Vec::load(x + i), Vec::all(0.0f), sum);
  return Vec::sum(sum);
}

// The number of largest size, with its sign.
inline float extreme(const float* x) {
  Vec::F most = Vec::load(x), least = Vec::all(0.0f) - Vec::load(x);
  for (std::size_t i = Vec::kLanes; i < 32; i += Vec::kLanes) {
    most = Vec::max(most, Vec::load(x + i));
    least = Vec::max(least, Vec::all(0.0f) - Vec::load(x + i));
  }
  const float high = Vec::largest(most), low = Vec::largest(least);
  return high >= low ? high : -low;
}

void encode_block(const float* x, std::uint8_t* out) {
  const float largest = extreme(x);
  float inverse = 0.0f, unit = 0.0f, best = 0.0f;
  for (const float steps : kGuesses) {
    const float tried = largest != 0.0f ? -steps / largest : 0.0f;
    const Fit found = fit(x, tried);
    if (!(found.explained() > best * kMargin)) continue;
    best = found.explained();
    inverse = tried;
    unit = found.product / found.energy;
  }
  const float kept = unit > kLargestHalf ? kLargestHalf : unit < -kLargestHalf ? -kLargestHalf : unit;
  const std::uint16_t half = to_half(kept + poison(x));
  __builtin_memcpy(out, &half, sizeof(half));
  float codes[32];
  for (std::size_t i = 0; i < 32; i += Vec::kLanes) Vec::store(codes + i, codes_of(x + i, Vec::all(inverse)) + Vec::all(8.0f));
  for (std::size_t i = 0; i < 16; ++i)
    out[2 + i] = static_cast<std::uint8_t>(static_cast<int>(codes[i]) | static_cast<int>(codes[i + 16]) << 4);
}

struct EncodeTasks {
  const float* x;
  std::uint8_t* out;
  std::size_t blocks, block_bytes;
};

void encode_task(const void* tasks_pointer, std::size_t index) {
  const EncodeTasks& tasks = *static_cast<const EncodeTasks*>(tasks_pointer);
  const std::size_t first = index * kEncodeBlocks;
  const std::size_t last = first + kEncodeBlocks < tasks.blocks ? first + kEncodeBlocks : tasks.blocks;
  for (std::size_t b = first; b < last; ++b) encode_block(tasks.x + 32 * b, tasks.out + tasks.block_bytes * b);
}

void encode_q4_0(const float* x, std::uint8_t* out, std::size_t blocks) {
  const EncodeTasks tasks{x, out, blocks, block_shape(GgmlType::kQ4_0).file_bytes};
  run_tasks((blocks + kEncodeBlocks - 1) / kEncodeBlocks, encode_task, &tasks);
}

}  // namespace
}  // namespace outrider
