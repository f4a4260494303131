// Float linear layers: weights float32 or bfloat16, activations and sums float32.
//
// Packed layout: panels of 2 x lanes output columns; in a panel, K steps of one weight a column. A bfloat16 step holds
// columns (0, lanes), (1, lanes + 1), ... side by side, so that a shift and a mask unpack it. Columns past N are zero.
//
// Each output is a sum of chunks of kChunk inputs; each chunk is one chain of multiply-adds from zero. Panels, row blocks
// and threads change nothing in that order.

namespace outrider {
namespace {

constexpr std::size_t kChunk = 256;        // inputs: a chunk of a float32 panel is 16 KiB with 16 columns
constexpr std::size_t kCacheRows = 96;     // rows whose chunk stays in the second-level cache
constexpr std::size_t kStreamRows = 16;    // up to here weights are read once, in the order of memory
constexpr std::size_t kGroupPanels = 8;    // panels that share a chunk of many rows
constexpr std::size_t kTaskWeights = 32768;  // at least so many to a task
constexpr std::size_t kAhead = 2048;       // bytes of weights that are asked for before they are used

inline void load_step(const float* w, Vec::F& low, Vec::F& high) {
  low = Vec::load(w);
  high = Vec::load(w + Vec::kLanes);
}

inline void load_step(const std::uint16_t* w, Vec::F& low, Vec::F& high) { Vec::bf16_pair(w, low, high); }

// y[r][0 .. kPanel) = from[r * from_step + ..] (0 if null) + chunk.
// Stream: the weights come from memory, and the processor's own prefetching stops at every page.
template <int R, bool Stream, class W>
inline void tile(const float* x, std::size_t x_step, const W* w, std::size_t count, const float* from, std::size_t from_step,
                 float* y, std::size_t y_step) {
  Vec::F sum[R][2];
  for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = Vec::all(0.0f);
  for (std::size_t k = 0; k < count; ++k) {
    Vec::F low, high;
    if (Stream) __builtin_prefetch(reinterpret_cast<const char*>(w + k * kPanel) + kAhead);
    load_step(w + k * kPanel, low, high);
    for (int r = 0; r < R; ++r) {
      const Vec::F value = Vec::all(x[r * x_step + k]);
      sum[r][0] = Vec::fma(value, low, sum[r][0]);
      sum[r][1] = Vec::fma(value, high, sum[r][1]);
    }
  }
  for (int r = 0; r < R; ++r) {
    float* row = y + r * y_step;
    const Vec::F zero = Vec::all(0.0f);
    const Vec::F low = from ? Vec::load(from + r * from_step) : zero;
    const Vec::F high = from ? Vec::load(from + r * from_step + Vec::kLanes) : zero;
    Vec::store(row, low + sum[r][0]);
    Vec::store(row + Vec::kLanes, high + sum[r][1]);
  }
}

template <bool Stream, class W>
inline void tile_of(std::size_t rows, const float* x, std::size_t x_step, const W* w, std::size_t count, const float* from,
                    std::size_t from_step, float* y, std::size_t y_step) {
  switch (rows) {
    case 1: return tile<1, Stream>(x, x_step, w, count, from, from_step, y, y_step);
    case 2: return tile<2, Stream>(x, x_step, w, count, from, from_step, y, y_step);
    case 3: return tile<3, Stream>(x, x_step, w, count, from, from_step, y, y_step);
    case 4: return tile<4, Stream>(x, x_step, w, count, from, from_step, y, y_step);
    case 5: return tile<5, Stream>(x, x_step, w, count, from, from_step, y, y_step);
    case 6: return tile<6, Stream>(x, x_step, w, count, from, from_step, y, y_step);
    case 7: return tile<7, Stream>(x, x_step, w, count, from, from_step, y, y_step);
    default: return tile<8, Stream>(x, x_step, w, count, from, from_step, y, y_step);
  }
}

// A panel that reaches past N works on a copy of its columns.
template <class W>
void edge_tile(std::size_t rows, std::size_t columns, const float* x, std::size_t x_step, const W* w, std::size_t count,
               const float* from, std::size_t from_step, float* y, std::size_t y_step) {
  float copy[Vec::kMaxRows * kPanel];
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t j = 0; j < kPanel; ++j) copy[r * kPanel + j] = from && j < columns ? from[r * from_step + j] : 0.0f;
  tile_of<false>(rows, x, x_step, w, count, copy, kPanel, copy, kPanel);
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t j = 0; j < columns; ++j) y[r * y_step + j] = copy[r * kPanel + j];
}

// Rows [m0, m1) x inputs [k0, k1) x one panel.
template <class W>
void panel_chunk(const LinearJob& job, std::size_t panel, std::size_t m0, std::size_t m1, std::size_t k0, std::size_t k1) {
  const W* w = static_cast<const W*>(job.packed) + (panel * job.k + k0) * kPanel;
  const std::size_t column = panel * kPanel;
  const std::size_t columns = job.n - column < kPanel ? job.n - column : kPanel;
  const std::size_t blocks = (m1 - m0 + Vec::kMaxRows - 1) / Vec::kMaxRows;
  for (std::size_t b = 0; b < blocks; ++b) {
    const std::size_t row = m0 + (m1 - m0) * b / blocks;
    const std::size_t rows = m0 + (m1 - m0) * (b + 1) / blocks - row;
    float* y = job.y + row * job.y_step + column;
    const float* from = k0 ? y : job.bias ? job.bias + column : nullptr;
    const std::size_t from_step = k0 ? job.y_step : 0;
    const float* x = job.x + row * job.k + k0;
    if (columns == kPanel && b == 0 && job.rows <= kStreamRows) {
      tile_of<true>(rows, x, job.k, w, k1 - k0, from, from_step, y, job.y_step);
    } else if (columns == kPanel) {
      tile_of<false>(rows, x, job.k, w, k1 - k0, from, from_step, y, job.y_step);
    } else {
      edge_tile(rows, columns, x, job.k, w, k1 - k0, from, from_step, y, job.y_step);
    }
  }
}

template <class W>
void panels(const LinearJob& job, std::size_t first, std::size_t last) {
  const std::size_t group = job.rows <= kStreamRows ? 1 : kGroupPanels;
  for (std::size_t p0 = first; p0 < last; p0 += group) {
    const std::size_t p1 = p0 + group < last ? p0 + group : last;
    for (std::size_t m0 = 0; m0 < job.rows; m0 += kCacheRows) {
      const std::size_t m1 = m0 + kCacheRows < job.rows ? m0 + kCacheRows : job.rows;
      for (std::size_t k0 = 0; k0 < job.k; k0 += kChunk) {
        const std::size_t k1 = k0 + kChunk < job.k ? k0 + kChunk : job.k;
        for (std::size_t panel = p0; panel < p1; ++panel) panel_chunk<W>(job, panel, m0, m1, k0, k1);
      }
    }
  }
}

struct LinearTasks {
  const LinearJob& job;
  std::size_t all_panels;
  std::size_t each;
};

void linear_task(const void* tasks_pointer, std::size_t index) {
  const LinearTasks& tasks = *static_cast<const LinearTasks*>(tasks_pointer);
  const std::size_t first = index * tasks.each;
  const std::size_t last = first + tasks.each < tasks.all_panels ? first + tasks.each : tasks.all_panels;
  if (tasks.job.dtype == Dtype::kF32) {
    panels<float>(tasks.job, first, last);
  } else {
    panels<std::uint16_t>(tasks.job, first, last);
  }
}

void linear(const LinearJob& job) {
  const std::size_t all_panels = (job.n + kPanel - 1) / kPanel;
  std::size_t each = kTaskWeights / (job.k * kPanel) + 1;
  if (job.rows > kStreamRows) each = kGroupPanels;
  const LinearTasks tasks{job, all_panels, each};
  run_tasks((all_panels + each - 1) / each, linear_task, &tasks);
}

struct PackJob {
  const void* weight;
  void* packed;
  std::size_t n, k;
  Dtype dtype;
};

template <class W>
void pack_panel(const PackJob& job, std::size_t panel) {
  const W* weight = static_cast<const W*>(job.weight);
  W* packed = static_cast<W*>(job.packed) + panel * job.k * kPanel;
  for (std::size_t j = 0; j < kPanel; ++j) {
    const std::size_t column = panel * kPanel + j;
    std::size_t place = j;
    if (sizeof(W) == 2) place = j < Vec::kLanes ? 2 * j : 2 * (j - Vec::kLanes) + 1;
    for (std::size_t k = 0; k < job.k; ++k) packed[k * kPanel + place] = column < job.n ? weight[column * job.k + k] : W{0};
  }
}

void pack_task(const void* job_pointer, std::size_t panel) {
  const PackJob& job = *static_cast<const PackJob*>(job_pointer);
  if (job.dtype == Dtype::kF32) {
    pack_panel<float>(job, panel);
  } else {
    pack_panel<std::uint16_t>(job, panel);
  }
}

void pack(const void* weight, void* packed, std::size_t n, std::size_t k, Dtype dtype) {
  const PackJob job{weight, packed, n, k, dtype};
  run_tasks((n + kPanel - 1) / kPanel, pack_task, &job);
}

}  // namespace
}  // namespace outrider
