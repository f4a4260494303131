// Quantised linear layers: exact integer products of weight codes and 8-bit activations within a group, float32 across
// groups, one chain of multiply-adds in the order of the inputs for each output. Layout: quantised.h.

namespace outrider {
namespace {

constexpr std::size_t kQuantRows = 6;          // rows that share an unpacked code
constexpr std::size_t kQuantStreamBlocks = 3;  // blocks of rows up to which weights come from memory
constexpr std::size_t kQuantCacheBlocks = 16;  // blocks whose activations stay in the cache
constexpr std::size_t kQuantGroupPanels = 16;
constexpr std::size_t kTilePanels = 2;         // panels that share a spread activation
constexpr std::size_t kQuantTaskWeights = 32768;
constexpr std::size_t kQuantAhead = 1536;      // bytes
constexpr std::size_t kQuantiseGroups = 256;   // of a task
constexpr std::size_t kVectorBytes = 4 * Vec::kLanes;

// Activations of a block of R <= kQuantRows rows, group by group of 32 inputs: codes [group][row][32] in [-127, 127],
// scales [group][row], and sums of codes, times the scale, or times the number that stands for zero in the weights' codes
// (sums of halves: [group][half][row]).
struct Activations {
  const std::int8_t* codes;
  const float* scales;
  const float* scaled_sums;
  const std::int32_t* zero_sums;
  const std::int32_t* zero_half_sums;
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

// A tile is R rows of kTilePanels panels: a code is unpacked once for the rows, and an activation spread over the lanes once
// for the panels, which are `step` bytes apart. What follows must be inlined: a call would send all sums through memory.
#define OUTRIDER_INLINE __attribute__((always_inline)) inline

template <class T, int R>
using Tile = T[R][kTilePanels];

template <class Code, int R, int Quad>
OUTRIDER_INLINE void add_quad(const std::uint8_t* codes, std::size_t step, const std::int8_t* x, Tile<Vec::A, R>& sums) {
  Vec::B weights[kTilePanels];
  for (std::size_t p = 0; p < kTilePanels; ++p) weights[p] = Code::template quad<Quad>(codes + p * step);
  for (int r = 0; r < R; ++r) {
    const Vec::B value = Vec::quad(x + 32 * r + 4 * Quad);
    for (std::size_t p = 0; p < kTilePanels; ++p) sums[r][p] = Vec::dot(sums[r][p], weights[p], value);
  }
}

template <class Code, int R, int Quad, int Count>
OUTRIDER_INLINE void add_quads(const std::uint8_t* codes, std::size_t step, const std::int8_t* x, Tile<Vec::A, R>& sums) {
  add_quad<Code, R, Quad>(codes, step, x, sums);
  if constexpr (Count > 1) add_quads<Code, R, Quad + 1, Count - 1>(codes, step, x, sums);
}

// Adds the products of quads [Quad, Quad + Count); First: `total` holds nothing yet.
template <class Code, int R, int Quad, int Count, bool First = true>
OUTRIDER_INLINE void dots(const std::uint8_t* codes, std::size_t step, const std::int8_t* x, Tile<Vec::I, R>& total) {
  constexpr int now = Count < Code::kFlush ? Count : Code::kFlush;
  Tile<Vec::A, R> sums;
  for (int r = 0; r < R; ++r)
    for (std::size_t p = 0; p < kTilePanels; ++p) sums[r][p] = Vec::no_dots();
  add_quads<Code, R, Quad, now>(codes, step, x, sums);
  for (int r = 0; r < R; ++r)
    for (std::size_t p = 0; p < kTilePanels; ++p)
      total[r][p] = First ? Vec::emptied(sums[r][p]) : Vec::plus(total[r][p], Vec::emptied(sums[r][p]));
  if constexpr (Count > now) dots<Code, R, Quad + now, Count - now, false>(codes, step, x, total);
}

// Eight-bit codes of one panel: two nibbles where the accumulator is narrow, which leaves no registers for a second panel.
template <int R>
OUTRIDER_INLINE void byte_dots(const std::uint8_t* codes, const std::int8_t* x, std::size_t p, Tile<Vec::I, R>& total) {
  Vec::A low[R], high[R];
  for (int r = 0; r < R; ++r) low[r] = high[r] = Vec::no_dots();
  for (int quad = 0; quad < 8; ++quad) {
    const Vec::B weights = Vec::bytes(codes + quad * kVectorBytes);
    for (int r = 0; r < R; ++r) {
      const Vec::B value = Vec::quad(x + 32 * r + 4 * quad);
      if (Vec::kWideDots) {
        low[r] = Vec::dot(low[r], weights, value);
      } else {
        low[r] = Vec::dot(low[r], Vec::low_nibbles(weights), value);
        high[r] = Vec::dot(high[r], Vec::high_nibbles(weights), value);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    total[r][p] = Vec::emptied(low[r]);
    if (!Vec::kWideDots) total[r][p] = Vec::plus(total[r][p], Vec::times_sixteen(Vec::emptied(high[r])));
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
OUTRIDER_INLINE void add_part(const Scale (&scales)[kTilePanels], const std::uint8_t* group, std::size_t step,
                              const Activations& x, std::size_t g, Tile<Vec::F, R>& sum) {
  constexpr int quads = 8 / Scale::kParts;
  const std::uint8_t* codes = group + Scale::kGroupBytes;
  const std::int8_t* values = x.codes + 32 * R * g;
  Tile<Vec::I, R> total;
  if constexpr (Code::kFlush == 0) {
    for (std::size_t p = 0; p < kTilePanels; ++p) byte_dots<R>(codes + p * step, values, p, total);
  } else {
    dots<Code, R, Part * quads, quads>(codes, step, values, total);
  }
  Vec::F scale[kTilePanels];
  for (std::size_t p = 0; p < kTilePanels; ++p) scale[p] = scales[p].scale(group + p * step, Part);
  const std::int32_t* zeros = Scale::kParts == 1 ? x.zero_sums + R * g : x.zero_half_sums + R * (2 * g + Part);
  for (int r = 0; r < R; ++r)
    for (std::size_t p = 0; p < kTilePanels; ++p) {
      if (Scale::kZero) total[r][p] = Vec::minus(total[r][p], Vec::whole(zeros[r]));
      sum[r][p] = Vec::fma(Vec::floats(total[r][p]), scale[p] * Vec::all(x.scales[R * g + r]), sum[r][p]);
    }
  if constexpr (Part + 1 < Scale::kParts) add_part<Code, Scale, R, Part + 1>(scales, group, step, x, g, sum);
}

template <class Scale, int R>
OUTRIDER_INLINE void add_offsets(const Scale (&scales)[kTilePanels], const std::uint8_t* group, std::size_t step,
                                 const Activations& x, std::size_t g, Tile<Vec::F, R>& sum) {
  for (std::size_t p = 0; p < kTilePanels; ++p) {
    const Vec::F offset = scales[p].offset(group + p * step);
    for (int r = 0; r < R; ++r) sum[r][p] = Vec::fma(offset, Vec::all(x.scaled_sums[R * g + r]), sum[r][p]);
  }
}

// out[(r * kTilePanels + p) * kLanes ..] = the columns of panel p.
template <class Code, class Scale, int R>
void quant_tile(const std::uint8_t* w, std::size_t step, const Activations& activations, std::size_t groups, std::size_t ahead,
                float* out) {
  static_assert(kTilePanels == 2, "two heads are read below");
  const Activations x = activations;
  Tile<Vec::F, R> sum;
  for (int r = 0; r < R; ++r)
    for (std::size_t p = 0; p < kTilePanels; ++p) sum[r][p] = Vec::all(0.0f);
  for (std::size_t g = 0; g < groups;) {
    const Scale scales[kTilePanels] = {Scale(w), Scale(w + step)};
    w += Scale::kHeadBytes;
    for (std::size_t inner = 0; inner < Scale::kGroups; ++inner, ++g) {
      for (std::size_t p = 0; p < kTilePanels; ++p)
        for (std::size_t line = 0; line < Scale::kGroupBytes + Code::kBytes; line += 64)
          __builtin_prefetch(w + p * step + ahead + line);
      add_part<Code, Scale, R, 0>(scales, w, step, x, g, sum);
      if (Scale::kOffset) add_offsets<Scale, R>(scales, w, step, x, g, sum);
      w += Scale::kGroupBytes + Code::kBytes;
    }
  }
  for (int r = 0; r < R; ++r)
    for (std::size_t p = 0; p < kTilePanels; ++p) Vec::store(out + (r * kTilePanels + p) * Vec::kLanes, sum[r][p]);
}

template <class Code, class Scale>
void quant_tile_of(std::size_t rows, const std::uint8_t* w, std::size_t step, const Activations& x, std::size_t groups,
                   std::size_t ahead, float* out) {
  switch (rows) {
    case 1: return quant_tile<Code, Scale, 1>(w, step, x, groups, ahead, out);
    case 2: return quant_tile<Code, Scale, 2>(w, step, x, groups, ahead, out);
    case 3: return quant_tile<Code, Scale, 3>(w, step, x, groups, ahead, out);
    case 4: return quant_tile<Code, Scale, 4>(w, step, x, groups, ahead, out);
    case 5: return quant_tile<Code, Scale, 5>(w, step, x, groups, ahead, out);
    default: return quant_tile<Code, Scale, 6>(w, step, x, groups, ahead, out);
  }
}

struct Rows {
  std::size_t first, count;
};

// Block `index` of a job's rows; blocks differ by one row at most.
inline Rows block_rows(std::size_t rows, std::size_t index) {
  const std::size_t blocks = (rows + kQuantRows - 1) / kQuantRows;
  const std::size_t first = rows * index / blocks;
  return Rows{first, rows * (index + 1) / blocks - first};
}

struct QuantTasks {
  const QuantLinearJob& job;
  Activations x;
  std::size_t panels, each;
  void (*tile_of)(std::size_t, const std::uint8_t*, std::size_t, const Activations&, std::size_t, std::size_t, float*);
};

// The tile that begins at `panel`. Where no second panel follows, the tile is the last two and the first of them is left
// out; the only panel of a matrix is both.
void quant_panel_block(const QuantTasks& tasks, std::size_t panel, std::size_t block, std::size_t ahead) {
  const QuantLinearJob& job = tasks.job;
  const Rows rows = block_rows(job.rows, block);
  const std::size_t groups = job.k / 32, done = rows.first * groups;
  const Activations x{tasks.x.codes + 32 * done, tasks.x.scales + done, tasks.x.scaled_sums + done, tasks.x.zero_sums + done,
                      tasks.x.zero_half_sums + 2 * done};
  const std::size_t extra = panel > 0 && panel + kTilePanels > tasks.panels ? 1 : 0;
  const std::size_t step = tasks.panels < kTilePanels ? 0 : job.panel_bytes, width = kTilePanels * Vec::kLanes;
  alignas(64) float out[kQuantRows * kTilePanels * Vec::kLanes];
  tasks.tile_of(rows.count, job.packed + (panel - extra) * job.panel_bytes, step, x, groups, ahead, out);
  const std::size_t column = panel * Vec::kLanes, room = width - extra * Vec::kLanes;
  const std::size_t columns = job.n - column < room ? job.n - column : room;
  for (std::size_t r = 0; r < rows.count; ++r) {
    float* y = job.y + (rows.first + r) * job.y_step + column;
    const float* from = out + r * width + extra * Vec::kLanes;
    for (std::size_t j = 0; j < columns; ++j) y[j] = from[j] + (job.bias ? job.bias[column + j] : 0.0f);
  }
}

void quant_task(const void* tasks_pointer, std::size_t index) {
  const QuantTasks& tasks = *static_cast<const QuantTasks*>(tasks_pointer);
  const std::size_t first = index * tasks.each, blocks = (tasks.job.rows + kQuantRows - 1) / kQuantRows;
  const std::size_t last = first + tasks.each < tasks.panels ? first + tasks.each : tasks.panels;
  const std::size_t ahead = blocks <= kQuantStreamBlocks ? kQuantAhead : 0;
  for (std::size_t b0 = 0; b0 < blocks; b0 += kQuantCacheBlocks) {
    const std::size_t b1 = b0 + kQuantCacheBlocks < blocks ? b0 + kQuantCacheBlocks : blocks;
    for (std::size_t panel = first; panel < last; panel += kTilePanels)
      for (std::size_t block = b0; block < b1; ++block) quant_panel_block(tasks, panel, block, block == b0 ? ahead : 0);
  }
}

struct QuantiseJob {
  const float* x;
  std::int8_t* codes;
  float* scales;
  float* scaled_sums;
  std::int32_t* zero_sums;
  std::int32_t* zero_half_sums;
  std::size_t rows, k, chunks;
  std::int32_t zero;
};

// Codes of 32 numbers: round(x 127 / largest), sums of halves; returns the scale. A number that is not finite makes the
// scale not a number.
float quantise_group(const float* x, std::int8_t* codes, std::int32_t* halves) {
  Vec::F most = Vec::all(0.0f), poison = Vec::all(0.0f);
  for (std::size_t i = 0; i < 32; i += Vec::kLanes) {
    const Vec::F value = Vec::load(x + i);
    most = Vec::max(Vec::max(value, Vec::all(0.0f) - value), most);
    poison = Vec::fma(value, Vec::all(0.0f), poison);
  }
  const float largest = Vec::largest(most);
  const Vec::F inverse = Vec::all(largest > 0.0f ? 127.0f / largest : 0.0f);
  Vec::round_to_bytes(x, inverse, codes, halves);
  return largest / 127.0f + Vec::sum(poison);
}

void quantise_task(const void* job_pointer, std::size_t index) {
  const QuantiseJob& job = *static_cast<const QuantiseJob*>(job_pointer);
  const Rows rows = block_rows(job.rows, index / job.chunks);
  const std::size_t groups = job.k / 32, first = index % job.chunks * kQuantiseGroups;
  const std::size_t last = first + kQuantiseGroups < groups ? first + kQuantiseGroups : groups;
  for (std::size_t g = first; g < last; ++g)
    for (std::size_t r = 0; r < rows.count; ++r) {
      const std::size_t place = rows.first * groups + g * rows.count + r;
      const std::size_t half_place = 2 * (rows.first * groups + g * rows.count) + r;
      std::int32_t halves[2];
      const float scale = quantise_group(job.x + (rows.first + r) * job.k + 32 * g, job.codes + 32 * place, halves);
      const std::int32_t sum = halves[0] + halves[1];
      job.scales[place] = scale;
      job.scaled_sums[place] = scale * static_cast<float>(sum);
      job.zero_sums[place] = job.zero * sum;
      job.zero_half_sums[half_place] = job.zero * halves[0];
      job.zero_half_sums[half_place + rows.count] = job.zero * halves[1];
    }
}

Activations quantise(const QuantLinearJob& job, int zero) {
  const std::size_t groups = job.rows * (job.k / 32), chunks = (job.k / 32 + kQuantiseGroups - 1) / kQuantiseGroups;
  float* memory = static_cast<float*>(Scratch::of_thread().room(0, groups * (32 + 5 * sizeof(float))));
  std::int32_t* sums = reinterpret_cast<std::int32_t*>(memory + 2 * groups);
  std::int8_t* codes = reinterpret_cast<std::int8_t*>(sums + 3 * groups);
  const QuantiseJob made{job.x, codes, memory, memory + groups, sums, sums + groups, job.rows, job.k, chunks, zero};
  run_tasks((job.rows + kQuantRows - 1) / kQuantRows * chunks, quantise_task, &made);
  return Activations{codes, made.scales, made.scaled_sums, made.zero_sums, made.zero_half_sums};
}

template <class Code, class Scale>
void quant_linear_of(const QuantLinearJob& job) {
  const Activations x = quantise(job, Scale::kZero);
  const std::size_t panels = (job.n + Vec::kLanes - 1) / Vec::kLanes;
  const bool streams = job.rows <= kQuantStreamBlocks * kQuantRows;
  const std::size_t tile = kTilePanels * job.k * Vec::kLanes;
  const std::size_t each = streams ? (kQuantTaskWeights / tile + 1) * kTilePanels : kQuantGroupPanels;
  const QuantTasks tasks{job, x, panels, each, quant_tile_of<Code, Scale>};
  run_tasks((panels + each - 1) / each, quant_task, &tasks);
}

void quant_linear(const QuantLinearJob& job) {
  switch (job.type) {
    case GgmlType::kQ4_0: return quant_linear_of<Nibbles, PlainScale<8>>(job);
    case GgmlType::kQ4_1: return quant_linear_of<Nibbles, ScaleAndOffset>(job);
    case GgmlType::kQ5_0: return quant_linear_of<FiveBits, PlainScale<16>>(job);
    case GgmlType::kQ5_1: return quant_linear_of<FiveBits, ScaleAndOffset>(job);
    case GgmlType::kQ8_0: return quant_linear_of<EightBits, PlainScale<128>>(job);
    case GgmlType::kQ4_K: return quant_linear_of<Nibbles, NestedScaleAndMinimum>(job);
    case GgmlType::kQ5_K: return quant_linear_of<FiveBits, NestedScaleAndMinimum>(job);
    case GgmlType::kQ6_K: return quant_linear_of<SixBits, NestedHalfScales>(job);
  }
}

}  // namespace
}  // namespace outrider
