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

struct QuantTasks {
  const QuantLinearJob& job;
  Activations x;
  std::size_t panels, each;
  void (*tile_of)(std::size_t, const std::uint8_t*, const Activations&, std::size_t, std::size_t, float*, std::size_t);
};

void quant_panel_block(const QuantTasks& tasks, std::size_t panel, std::size_t block, std::size_t ahead) {
  const QuantLinearJob& job = tasks.job;
  const Rows rows = block_rows(job.rows, kQuantRows, block);
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
  const std::size_t first = index * tasks.each, blocks = blocks_of(tasks.job.rows, kQuantRows);
  const std::size_t last = first + tasks.each < tasks.panels ? first + tasks.each : tasks.panels;
  const std::size_t ahead = blocks <= kQuantStreamBlocks ? kQuantAhead : 0;
  for (std::size_t b0 = 0; b0 < blocks; b0 += kQuantCacheBlocks) {
    const std::size_t b1 = b0 + kQuantCacheBlocks < blocks ? b0 + kQuantCacheBlocks : blocks;
    for (std::size_t panel = first; panel < last; ++panel)
      for (std::size_t block = b0; block < b1; ++block) quant_panel_block(tasks, panel, block, block == b0 ? ahead : 0);
  }
}

template <class Code, class Scale>
struct TileProduct {
  static void run(const QuantLinearJob& job) {
    const Activations x = quantise(job, Scale::kZero, kQuantRows);
    const std::size_t panels = (job.n + kPanel - 1) / kPanel;
    const bool streams = job.rows <= kQuantStreamBlocks * kQuantRows;
    const std::size_t each = streams ? kQuantTaskWeights / (job.k * kPanel) + 1 : kQuantGroupPanels;
    const QuantTasks tasks{job, x, panels, each, quant_tile_of<Code, Scale>};
    run_tasks((panels + each - 1) / each, quant_task, &tasks);
  }
};

void quant_linear(const QuantLinearJob& job) { run_for_type<TileProduct>(job); }

}  // namespace
}  // namespace outrider
