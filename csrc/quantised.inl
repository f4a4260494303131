// Quantised linear layers: exact integer products of weight codes and 8-bit activations within a group, float32 across
// groups, one chain of multiply-adds in the order of the inputs for each output. Layout: quantised.h.

namespace outrider {
namespace {

constexpr std::size_t kQuantRows = Vec::kLanes == 16 ? 8 : 6;  // rows that share an unpacked code
constexpr std::size_t kQuantStreamBlocks = 3;  // blocks of rows up to which weights come from memory
constexpr std::size_t kQuantCacheBlocks = 16;  // blocks whose activations stay in the cache
constexpr std::size_t kQuantGroupPanels = 8;
constexpr std::size_t kQuantTaskWeights = 32768;
constexpr std::size_t kQuantAhead = 1536;      // bytes
constexpr std::size_t kQuantiseGroups = 256;   // of a task
constexpr std::size_t kVectorBytes = 4 * Vec::kLanes;
constexpr std::size_t kVectors = kPanel / Vec::kLanes;  // of a panel
constexpr std::size_t kSlotBytes = kVectors * kVectorBytes;

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

// How many quads the level's accumulator takes before it must be emptied into 32 bits: quads * 2 * 127 * largest code < 2^15.
constexpr int flush_after(int quads) { return Vec::kWideDots ? 8 : quads; }

// The codes of a group, slot after slot of a quad or two. `quad` unpacks four inputs of each column of the vector whose slots
// begin at `codes`.

struct Nibbles {
  static constexpr std::size_t kBytes = 4 * kSlotBytes;
  static constexpr bool kByteCodes = false;
  static constexpr int kFlush = flush_after(8);
  template <int Quad>
  static Vec::B quad(const std::uint8_t* codes) {
    const Vec::B both = Vec::bytes(codes + Quad / 2 * kSlotBytes);
    return Quad % 2 ? Vec::high_nibbles(both) : Vec::low_nibbles(both);
  }
};

struct FiveBits {
  static constexpr std::size_t kBytes = 5 * kSlotBytes;
  static constexpr bool kByteCodes = false;
  static constexpr int kFlush = flush_after(4);
  template <int Quad>
  static Vec::B quad(const std::uint8_t* codes) {
    const Vec::B bits = Vec::bytes(codes + 4 * kSlotBytes);
    return Vec::either(Nibbles::quad<Quad>(codes), Vec::template move_bits<4 - Quad>(bits, 0x10));
  }
};

struct SixBits {
  static constexpr std::size_t kBytes = 6 * kSlotBytes;
  static constexpr bool kByteCodes = false;
  static constexpr int kFlush = flush_after(2);
  template <int Quad>
  static Vec::B quad(const std::uint8_t* codes) {
    const Vec::B bits = Vec::bytes(codes + (4 + Quad / 4) * kSlotBytes);
    return Vec::either(Nibbles::quad<Quad>(codes), Vec::template move_bits<4 - Quad % 4 * 2>(bits, 0x30));
  }
};

struct EightBits {
  static constexpr std::size_t kBytes = 8 * kSlotBytes;
  static constexpr bool kByteCodes = true;
  static constexpr int kFlush = flush_after(0);
  template <int Quad>
  static Vec::B quad(const std::uint8_t* codes) {
    return Vec::bytes(codes + Quad * kSlotBytes);
  }
};

// A tile is R rows of a panel: a code is unpacked once for the rows, an activation spread over the lanes once for the
// vectors. What follows is inlined (each vec_*.h says how): a call would send all sums through memory.

template <class T, int R>
using Tile = T[R][kVectors];

template <class Code, int R, int Quad>
OUTRIDER_INLINE void add_quad(const std::uint8_t* codes, const std::int8_t* x, Tile<Vec::A, R>& sums) {
  Vec::B weights[kVectors];
  for (std::size_t v = 0; v < kVectors; ++v) weights[v] = Code::template quad<Quad>(codes + v * kVectorBytes);
  for (int r = 0; r < R; ++r) {
    const Vec::B value = Vec::quad(x + 32 * r + 4 * Quad);
    for (std::size_t v = 0; v < kVectors; ++v) sums[r][v] = Vec::dot(sums[r][v], weights[v], value);
  }
}

template <class Code, int R, int Quad, int Count>
OUTRIDER_INLINE void add_quads(const std::uint8_t* codes, const std::int8_t* x, Tile<Vec::A, R>& sums) {
  add_quad<Code, R, Quad>(codes, x, sums);
  if constexpr (Count > 1) add_quads<Code, R, Quad + 1, Count - 1>(codes, x, sums);
}

// Adds the products of quads [Quad, Quad + Count); First: `total` holds nothing yet.
template <class Code, int R, int Quad, int Count, bool First = true>
OUTRIDER_INLINE void dots(const std::uint8_t* codes, const std::int8_t* x, Tile<Vec::I, R>& total) {
  constexpr int now = Count < Code::kFlush ? Count : Code::kFlush;
  Tile<Vec::A, R> sums;
  for (int r = 0; r < R; ++r)
    for (std::size_t v = 0; v < kVectors; ++v) sums[r][v] = Vec::no_dots();
  add_quads<Code, R, Quad, now>(codes, x, sums);
  for (int r = 0; r < R; ++r)
    for (std::size_t v = 0; v < kVectors; ++v)
      total[r][v] = First ? Vec::emptied(sums[r][v]) : Vec::plus(total[r][v], Vec::emptied(sums[r][v]));
  if constexpr (Count > now) dots<Code, R, Quad + now, Count - now, false>(codes, x, total);
}

// Eight-bit codes of one vector where the accumulator is narrow: two nibbles, which leaves no registers for a second vector.
template <int R>
OUTRIDER_INLINE void byte_dots(const std::uint8_t* codes, const std::int8_t* x, std::size_t v, Tile<Vec::I, R>& total) {
  Vec::A low[R], high[R];
  for (int r = 0; r < R; ++r) low[r] = high[r] = Vec::no_dots();
  for (int quad = 0; quad < 8; ++quad) {
    const Vec::B weights = Vec::bytes(codes + v * kVectorBytes + quad * kSlotBytes);
    for (int r = 0; r < R; ++r) {
      const Vec::B value = Vec::quad(x + 32 * r + 4 * quad);
      low[r] = Vec::dot(low[r], Vec::low_nibbles(weights), value);
      high[r] = Vec::dot(high[r], Vec::high_nibbles(weights), value);
    }
  }
  for (int r = 0; r < R; ++r) total[r][v] = Vec::plus(Vec::emptied(low[r]), Vec::times_sixteen(Vec::emptied(high[r])));
}

// The scales of one vector: a group has kParts parts of equal length with a scale each; a weight is
// scale x (code - kZero) + offset. Fields of a panel follow one another, so those of vector v begin v vectors later.

inline const std::uint8_t* halves_field(const std::uint8_t* at, std::size_t field, std::size_t v) {
  return at + 2 * (field * kPanel + v * Vec::kLanes);
}

inline const std::uint8_t* bytes_field(const std::uint8_t* at, std::size_t field, std::size_t v) {
  return at + field * kPanel + v * Vec::kLanes;
}

template <int Zero>
struct PlainScale {
  static constexpr std::size_t kGroups = 1, kHeadBytes = 0, kGroupBytes = 2 * kPanel;
  static constexpr int kParts = 1, kZero = Zero;
  static constexpr bool kOffset = false;
  std::size_t v;
  PlainScale(const std::uint8_t*, std::size_t vector) : v(vector) {}
  Vec::F scale(const std::uint8_t* at, int) const { return Vec::halves(halves_field(at, 0, v)); }
  Vec::F offset(const std::uint8_t*) const { return Vec::all(0.0f); }
};

struct ScaleAndOffset {
  static constexpr std::size_t kGroups = 1, kHeadBytes = 0, kGroupBytes = 4 * kPanel;
  static constexpr int kParts = 1, kZero = 0;
  static constexpr bool kOffset = true;
  std::size_t v;
  ScaleAndOffset(const std::uint8_t*, std::size_t vector) : v(vector) {}
  Vec::F scale(const std::uint8_t* at, int) const { return Vec::halves(halves_field(at, 0, v)); }
  Vec::F offset(const std::uint8_t* at) const { return Vec::halves(halves_field(at, 1, v)); }
};

struct NestedScaleAndMinimum {
  static constexpr std::size_t kGroups = 8, kHeadBytes = 4 * kPanel, kGroupBytes = 2 * kPanel;
  static constexpr int kParts = 1, kZero = 0;
  static constexpr bool kOffset = true;
  std::size_t v;
  Vec::F unit, minus_minimum;
  NestedScaleAndMinimum(const std::uint8_t* head, std::size_t vector)
      : v(vector), unit(Vec::halves(halves_field(head, 0, v))), minus_minimum(Vec::all(0.0f) - Vec::halves(halves_field(head, 1, v))) {}
  Vec::F scale(const std::uint8_t* at, int) const { return unit * Vec::unsigned_bytes(bytes_field(at, 0, v)); }
  Vec::F offset(const std::uint8_t* at) const { return minus_minimum * Vec::unsigned_bytes(bytes_field(at, 1, v)); }
};

struct NestedHalfScales {
  static constexpr std::size_t kGroups = 8, kHeadBytes = 2 * kPanel, kGroupBytes = 2 * kPanel;
  static constexpr int kParts = 2, kZero = 32;
  static constexpr bool kOffset = false;
  std::size_t v;
  Vec::F unit;
  NestedHalfScales(const std::uint8_t* head, std::size_t vector) : v(vector), unit(Vec::halves(halves_field(head, 0, v))) {}
  Vec::F scale(const std::uint8_t* at, int part) const { return unit * Vec::signed_bytes(bytes_field(at, static_cast<std::size_t>(part), v)); }
  Vec::F offset(const std::uint8_t*) const { return Vec::all(0.0f); }
};

template <class Code, class Scale, int R, int Part>
OUTRIDER_INLINE void add_part(const Scale (&scales)[kVectors], const std::uint8_t* group, const Activations& x, std::size_t g,
                              Tile<Vec::F, R>& sum) {
  constexpr int quads = 8 / Scale::kParts;
  const std::uint8_t* codes = group + Scale::kGroupBytes;
  const std::int8_t* values = x.codes + 32 * R * g;
  Tile<Vec::I, R> total;
  if constexpr (Code::kByteCodes && !Vec::kWideDots) {
    for (std::size_t v = 0; v < kVectors; ++v) byte_dots<R>(codes, values, v, total);
  } else {
    dots<Code, R, Part * quads, quads>(codes, values, total);
  }
  Vec::F scale[kVectors];
  for (std::size_t v = 0; v < kVectors; ++v) scale[v] = scales[v].scale(group, Part);
  const std::int32_t* zeros = Scale::kParts == 1 ? x.zero_sums + R * g : x.zero_half_sums + R * (2 * g + Part);
  for (int r = 0; r < R; ++r)
    for (std::size_t v = 0; v < kVectors; ++v) {
      if (Scale::kZero) total[r][v] = Vec::minus(total[r][v], Vec::whole(zeros[r]));
      sum[r][v] = Vec::fma(Vec::floats(total[r][v]), scale[v] * Vec::all(x.scales[R * g + r]), sum[r][v]);
    }
  if constexpr (Part + 1 < Scale::kParts) add_part<Code, Scale, R, Part + 1>(scales, group, x, g, sum);
}

template <class Scale, int R>
OUTRIDER_INLINE void add_offsets(const Scale (&scales)[kVectors], const std::uint8_t* group, const Activations& x, std::size_t g,
                                 Tile<Vec::F, R>& sum) {
  for (std::size_t v = 0; v < kVectors; ++v) {
    const Vec::F offset = scales[v].offset(group);
    for (int r = 0; r < R; ++r) sum[r][v] = Vec::fma(offset, Vec::all(x.scaled_sums[R * g + r]), sum[r][v]);
  }
}

// out[r * step ..] = the panel's columns.
template <class Code, class Scale, int R>
void quant_tile(const std::uint8_t* w, const Activations& activations, std::size_t groups, std::size_t ahead, float* out,
                std::size_t step) {
  static_assert(kVectors == 2, "scales of two vectors are read below");
  const Activations x = activations;
  Tile<Vec::F, R> sum;
  for (int r = 0; r < R; ++r)
    for (std::size_t v = 0; v < kVectors; ++v) sum[r][v] = Vec::all(0.0f);
  for (std::size_t g = 0; g < groups;) {
    const Scale scales[kVectors] = {Scale(w, 0), Scale(w, 1)};
    w += Scale::kHeadBytes;
    for (std::size_t inner = 0; inner < Scale::kGroups; ++inner, ++g) {
      for (std::size_t line = 0; line < Scale::kGroupBytes + Code::kBytes; line += 64) __builtin_prefetch(w + ahead + line);
      add_part<Code, Scale, R, 0>(scales, w, x, g, sum);
      if (Scale::kOffset) add_offsets<Scale, R>(scales, w, x, g, sum);
      w += Scale::kGroupBytes + Code::kBytes;
    }
  }
  for (int r = 0; r < R; ++r)
    for (std::size_t v = 0; v < kVectors; ++v) Vec::store(out + r * step + v * Vec::kLanes, sum[r][v]);
}

template <class Code, class Scale>
void quant_tile_of(std::size_t rows, const std::uint8_t* w, const Activations& x, std::size_t groups, std::size_t ahead, float* out,
                   std::size_t step) {
  switch (rows) {
    case 1: return quant_tile<Code, Scale, 1>(w, x, groups, ahead, out, step);
    case 2: return quant_tile<Code, Scale, 2>(w, x, groups, ahead, out, step);
    case 3: return quant_tile<Code, Scale, 3>(w, x, groups, ahead, out, step);
    case 4: return quant_tile<Code, Scale, 4>(w, x, groups, ahead, out, step);
    case 5: return quant_tile<Code, Scale, 5>(w, x, groups, ahead, out, step);
    case 6: return quant_tile<Code, Scale, 6>(w, x, groups, ahead, out, step);
  }
  if constexpr (kQuantRows > 6) {
    if (rows == 7) return quant_tile<Code, Scale, 7>(w, x, groups, ahead, out, step);
    return quant_tile<Code, Scale, 8>(w, x, groups, ahead, out, step);
  }
}

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
  void (*tile_of)(std::size_t, const std::uint8_t*, const Activations&, std::size_t, std::size_t, float*, std::size_t);
};

void quant_panel_block(const QuantTasks& tasks, std::size_t panel, std::size_t block, std::size_t ahead) {
  const QuantLinearJob& job = tasks.job;
  const Rows rows = block_rows(job.rows, block);
  const std::size_t groups = job.k / 32, done = rows.first * groups, column = panel * kPanel;
  const std::size_t columns = job.n - column < kPanel ? job.n - column : kPanel;
  const Activations x{tasks.x.codes + 32 * done, tasks.x.scales + done, tasks.x.scaled_sums + done, tasks.x.zero_sums + done,
                      tasks.x.zero_half_sums + 2 * done};
  float* y = job.y + rows.first * job.y_step + column;
  float edge[kQuantRows * kPanel];  // of a panel that reaches past n
  const bool whole = columns == kPanel;
  tasks.tile_of(rows.count, job.packed + panel * job.panel_bytes, x, groups, ahead, whole ? y : edge, whole ? job.y_step : kPanel);
  for (std::size_t r = 0; r < rows.count && !whole; ++r)
    for (std::size_t j = 0; j < columns; ++j) y[r * job.y_step + j] = edge[r * kPanel + j];
  for (std::size_t r = 0; r < rows.count && job.bias; ++r)
    for (std::size_t j = 0; j < columns; ++j) y[r * job.y_step + j] += job.bias[column + j];
}

void quant_task(const void* tasks_pointer, std::size_t index) {
  const QuantTasks& tasks = *static_cast<const QuantTasks*>(tasks_pointer);
  const std::size_t first = index * tasks.each, blocks = (tasks.job.rows + kQuantRows - 1) / kQuantRows;
  const std::size_t last = first + tasks.each < tasks.panels ? first + tasks.each : tasks.panels;
  const std::size_t ahead = blocks <= kQuantStreamBlocks ? kQuantAhead : 0;
  for (std::size_t b0 = 0; b0 < blocks; b0 += kQuantCacheBlocks) {
    const std::size_t b1 = b0 + kQuantCacheBlocks < blocks ? b0 + kQuantCacheBlocks : blocks;
    for (std::size_t panel = first; panel < last; ++panel)
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
inline float quantise_group(const float* x, std::int8_t* codes, std::int32_t* halves) {
  const float largest = Vec::largest_magnitude(x);
  const Vec::F inverse = Vec::all(largest > 0.0f ? 127.0f / largest : 0.0f);
  Vec::round_to_bytes(x, inverse, codes, halves);
  return largest / 127.0f + (largest - largest);
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
  const std::size_t panels = (job.n + kPanel - 1) / kPanel;
  const bool streams = job.rows <= kQuantStreamBlocks * kQuantRows;
  const std::size_t each = streams ? kQuantTaskWeights / (job.k * kPanel) + 1 : kQuantGroupPanels;
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
