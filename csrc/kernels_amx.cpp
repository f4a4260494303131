// The level above AVX-512: wide passes over quantised weights make their integer products in AMX tiles. The sums in float32
// that follow are those of quantised.inl in the same order, so a row's result is the same bit for bit. All else is AVX-512's.
//
// Compiled for these instruction sets alone; no standard containers, as in kernels_avx512.cpp.
#include "vec_avx512.h"

#include "kernels.h"
#include "pool.h"
#include "scratch.h"

#include "panels.inl"

#include "codes.inl"

#include "activations.inl"

namespace outrider {
namespace {

constexpr std::size_t kWideRows = 20;          // from here on tiles are faster
constexpr std::size_t kTileRows = 16;
constexpr std::size_t kStep = 64;              // bytes of a full row of a tile
constexpr std::size_t kQuads = 8;              // of a group
constexpr std::size_t kCachedCodes = 1 << 20;  // bytes of activations that stay in the second-level cache
constexpr std::size_t kTaskProducts = 1 << 20;

// Groups whose products are made before any is added. While tiles are at work, one of the two units that multiply vectors of
// floats is shut, so both kinds of work take turns; and all that a turn reads and writes stays in the first-level cache.
template <class Scale>
constexpr std::size_t kTurn = Scale::kGroups > 1 ? Scale::kGroups : 9;

// Tile 0: products, 1: activations, 2: weights; of a group, for so many rows.
struct alignas(64) TileShapes {
  std::uint8_t palette = 1, start_row = 0, unused[14] = {};
  std::uint16_t row_bytes[16] = {kStep, 32, kStep};
  std::uint8_t rows[16];

  explicit TileShapes(std::size_t count) : rows{static_cast<std::uint8_t>(count), static_cast<std::uint8_t>(count), kQuads} {}
};

// A group of a panel, ready for tiles: codes less what stands for zero, [vector][quad][column][input of the quad].
struct alignas(64) Ready {
  std::int8_t codes[kVectors][kQuads * kStep];
  float scales[kPanel];
  float offsets[kPanel];
};

// Sums within a group for a block of rows, [vector][row][column].
struct alignas(64) Products {
  std::int32_t of[kVectors][kTileRows * Vec::kLanes];
};

template <class Code, int Zero, int Quad = 0>
OUTRIDER_INLINE void put_codes(const std::uint8_t* codes, std::int8_t* to) {
  const Vec::B quad = Code::template quad<Quad>(codes);
  _mm512_store_si512(to + Quad * kStep, Zero ? _mm512_sub_epi8(quad, _mm512_set1_epi8(static_cast<char>(Zero))) : quad);
  if constexpr (Quad + 1 < int{kQuads}) put_codes<Code, Zero, Quad + 1>(codes, to);
}

// Returns where the next groups begin.
template <class Code, class Scale>
const std::uint8_t* make_ready(const std::uint8_t* w, std::size_t groups, Ready* to) {
  for (std::size_t g = 0; g < groups;) {
    const Scale scales[kVectors] = {Scale(w, 0), Scale(w, 1)};
    w += Scale::kHeadBytes;
    for (std::size_t inner = 0; inner < Scale::kGroups; ++inner, ++g) {
      for (std::size_t v = 0; v < kVectors; ++v) {
        put_codes<Code, Scale::kZero>(w + Scale::kGroupBytes + v * kVectorBytes, to[g].codes[v]);
        Vec::store(to[g].scales + v * Vec::kLanes, scales[v].scale(w, 0));
        if (Scale::kOffset) Vec::store(to[g].offsets + v * Vec::kLanes, scales[v].offset(w));
      }
      w += Scale::kGroupBytes + Code::kBytes;
    }
  }
  return w;
}

inline void multiply(const std::int8_t* x, const Ready& group, Products& products) {
  _tile_loadd(1, x, 32);
  for (std::size_t v = 0; v < kVectors; ++v) {
    _tile_zero(0);
    _tile_loadd(2, group.codes[v], kStep);
    _tile_dpbssd(0, 1, 2);
    _tile_stored(0, products.of[v], kStep);
  }
}

// What follows a turn's products: scales and sums of a block of `rows` rows, [group][row].
struct Turn {
  const Ready* ready;
  const float* scales;
  const float* sums;
  std::size_t rows, groups;
  bool first;  // the totals hold nothing yet
};

// total[row][column] += what the groups give, for R rows from `row` on.
template <bool Offset, int R>
void add_products(const Products* products, const Turn& turn, std::size_t row, float* total) {
  const Ready* ready = turn.ready;
  const float* scales = turn.scales + row;
  const float* sums = turn.sums + row;
  const std::size_t rows = turn.rows, groups = turn.groups;
  total += row * kPanel;
  Vec::F sum[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (std::size_t v = 0; v < kVectors; ++v)
      sum[r][v] = turn.first ? Vec::all(0.0f) : Vec::load(total + r * kPanel + v * Vec::kLanes);
  for (std::size_t g = 0; g < groups; ++g, scales += rows, sums += rows) {
    for (int r = 0; r < R; ++r)
      for (std::size_t v = 0; v < kVectors; ++v) {
        const Vec::I product = _mm512_load_si512(products[g].of[v] + (row + static_cast<std::size_t>(r)) * Vec::kLanes);
        const Vec::F scale = Vec::load(ready[g].scales + v * Vec::kLanes) * Vec::all(scales[r]);
        sum[r][v] = Vec::fma(Vec::floats(product), scale, sum[r][v]);
        if (Offset) sum[r][v] = Vec::fma(Vec::load(ready[g].offsets + v * Vec::kLanes), Vec::all(sums[r]), sum[r][v]);
      }
  }
  for (int r = 0; r < R; ++r)
    for (std::size_t v = 0; v < kVectors; ++v) Vec::store(total + r * kPanel + v * Vec::kLanes, sum[r][v]);
}

// Halves of blocks: a wide pass has none of fewer than 10 rows.
template <bool Offset>
void add_products_of(Rows half, const Products* products, const Turn& turn, float* total) {
  switch (half.count) {
    case 5: return add_products<Offset, 5>(products, turn, half.first, total);
    case 6: return add_products<Offset, 6>(products, turn, half.first, total);
    case 7: return add_products<Offset, 7>(products, turn, half.first, total);
    case 8: return add_products<Offset, 8>(products, turn, half.first, total);
  }
}

// Memory that is needed soon.
struct Soon {
  const std::uint8_t* at;
  const std::uint8_t* end;

  void ask(std::size_t lines) {
    for (; lines && at < end; --lines, at += 64) __builtin_prefetch(at);
  }
};

void multiply_block(const std::int8_t* x, const Turn& turn, Soon& soon, std::size_t lines, Products* products) {
  for (std::size_t g = 0; g < turn.groups; ++g, x += 32 * turn.rows) {
    soon.ask(lines);
    multiply(x, turn.ready[g], products[g]);
  }
}

// Rows of `total` to y, with the bias.
void put_panel(const QuantLinearJob& job, std::size_t panel, Rows rows, const float* total) {
  for (std::size_t v = 0; v < kVectors; ++v) {
    const std::size_t column = panel * kPanel + v * Vec::kLanes, left = column < job.n ? job.n - column : 0;
    const __mmask16 there = static_cast<__mmask16>(left < 16 ? (1u << left) - 1 : 0xffff);
    const Vec::F bias = job.bias ? _mm512_maskz_loadu_ps(there, job.bias + column) : Vec::all(-0.0f);  // -0 + 0 would be 0
    float* y = job.y + rows.first * job.y_step + column;
    for (std::size_t r = 0; r < rows.count; ++r)
      _mm512_mask_storeu_ps(y + r * job.y_step, there, Vec::load(total + r * kPanel + v * Vec::kLanes) + bias);
  }
}

// Asks for the lines that put_panel will write: they may be far away.
void ask_for_panel(const QuantLinearJob& job, std::size_t panel, Rows rows) {
  const float* y = job.y + rows.first * job.y_step + panel * kPanel;
  for (std::size_t r = 0; r < rows.count; ++r)
    for (std::size_t v = 0; v < kVectors; ++v) __builtin_prefetch(y + r * job.y_step + v * Vec::kLanes, 1);
}

struct WideTasks {
  const QuantLinearJob& job;
  Activations x;
  std::size_t panels, each;
};

// Some blocks of a panel; `total` has room for their rows.
template <class Code, class Scale>
void wide_panel(const WideTasks& tasks, std::size_t panel, Rows blocks, float* total) {
  const QuantLinearJob& job = tasks.job;
  const std::size_t groups = job.k / 32, turns = blocks_of(groups, kTurn<Scale>);
  const std::size_t first = block_rows(job.rows, kTileRows, blocks.first).first;
  Ready ready[kTurn<Scale>];
  Products products[kTurn<Scale>];
  const std::uint8_t* w = job.packed + panel * job.panel_bytes;
  for (std::size_t t = 0; t < turns; ++t) {
    const Rows turn = block_rows(groups, kTurn<Scale>, t);
    const std::uint8_t* next = make_ready<Code, Scale>(w, turn.count, ready);
    Soon soon{next, next + (next - w)};
    w = next;
    const std::size_t lines = (Scale::kGroupBytes + Code::kBytes) / (64 * blocks.count) + 1;
    for (std::size_t block = blocks.first; block < blocks.first + blocks.count; ++block) {
      const Rows rows = block_rows(job.rows, kTileRows, block);
      const std::size_t done = rows.first * groups + rows.count * turn.first;
      const Turn of{ready, tasks.x.scales + done, tasks.x.scaled_sums + done, rows.count, turn.count, t == 0};
      float* of_block = total + (rows.first - first) * kPanel;
      multiply_block(tasks.x.codes + 32 * done, of, soon, lines, products);
      for (std::size_t h = 0; h < 2; ++h) {
        const Rows half = block_rows(rows.count, kTileRows / 2, h);
        const Rows of_y{rows.first + half.first, half.count};
        if (t + 1 == turns) ask_for_panel(job, panel, of_y);
        add_products_of<Scale::kOffset>(half, products, of, of_block);
        if (t + 1 == turns) put_panel(job, panel, of_y, of_block + half.first * kPanel);
      }
    }
  }
}

template <class Code, class Scale>
void wide_task(const void* tasks_pointer, std::size_t index) {
  const WideTasks& tasks = *static_cast<const WideTasks*>(tasks_pointer);
  const QuantLinearJob& job = tasks.job;
  const std::size_t first = index * tasks.each, last = first + tasks.each < tasks.panels ? first + tasks.each : tasks.panels;
  const std::size_t blocks = blocks_of(job.rows, kTileRows), cached = kCachedCodes / (kTileRows * job.k) + 1;
  const std::size_t most = cached < blocks ? cached : blocks;
  float* total = static_cast<float*>(Scratch::of_thread().room(1, most * kTileRows * kPanel * sizeof(float)));
  const TileShapes shapes((job.rows + blocks - 1) / blocks);
  _tile_loadconfig(&shapes);
  for (std::size_t b0 = 0; b0 < blocks; b0 += most)
    for (std::size_t panel = first; panel < last; ++panel)
      wide_panel<Code, Scale>(tasks, panel, Rows{b0, b0 + most < blocks ? most : blocks - b0}, total);
  _tile_release();  // the system saves and restores tiles with every thread that holds some
}

template <class Code, class Scale>
struct WideProduct {
  static void run(const QuantLinearJob& job) {
    const Activations x = quantise(job, 0, kTileRows);
    const std::size_t panels = (job.n + kPanel - 1) / kPanel, each = kTaskProducts / (job.rows * job.k * kPanel) + 1;
    const WideTasks tasks{job, x, panels, each};
    run_tasks((panels + each - 1) / each, wide_task<Code, Scale>, &tasks);
  }
};

// Two scales a group: twice the tiles and twice the sums, which is no faster.
template <class Code>
struct WideProduct<Code, NestedHalfScales> {
  static void run(const QuantLinearJob& job) { avx512_kernels().quant_linear(job); }
};

void quant_linear(const QuantLinearJob& job) {
  if (job.rows < kWideRows) return avx512_kernels().quant_linear(job);
  run_for_type<WideProduct>(job);
}

}  // namespace

const Kernels& amx_kernels() {
  static const Kernels kernels = [] {
    Kernels of_level = avx512_kernels();
    of_level.wide_rows = kWideRows;
    of_level.quant_linear = quant_linear;
    return of_level;
  }();
  return kernels;
}

}  // namespace outrider
