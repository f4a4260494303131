// Attention of few query rows over a long cache, in float32; keys and values float32 or bfloat16.
//
// What a row sees is cut into splits of kSplit positions, counted from position 0, with a softmax of its own each
// (Dao et al. 2022, 2205.14135, section 3.1); the splits are then merged in order. A task is one split of one kv head.

namespace outrider {
namespace {

constexpr std::size_t kSplit = 128;
constexpr std::size_t kTileHeads = 3;
constexpr std::size_t kReuse = 32;     // positions that stay in the first-level cache for all rows of a tile
constexpr std::size_t kTileRows = 8;
constexpr std::size_t kTileKeys = Vec::kLanes == 16 ? 8 : 4;
constexpr std::size_t kRowBlock = 64;
constexpr std::size_t kMergeAlone = 65536;

inline Vec::F load_lanes(const float* p) { return Vec::load(p); }
inline Vec::F load_lanes(const std::uint16_t* p) { return Vec::bf16(p); }

// scores[h * kSplit + i] = q[h] . keys[offsets[i]], for Q heads of one row; fills whole tiles of keys.
template <int Q, class T>
void score_tile(const float* q, const T* keys, const std::size_t* offsets, std::size_t count, std::size_t width,
                float* scores) {
  for (std::size_t i = 0; i < count; i += kTileKeys) {
    const T* key[kTileKeys];
    for (std::size_t j = 0; j < kTileKeys; ++j) key[j] = keys + offsets[i + j < count ? i + j : count - 1];
    Vec::F sum[Q][kTileKeys / 4][4];
    for (int h = 0; h < Q; ++h)
      for (std::size_t j = 0; j < kTileKeys; ++j) sum[h][j / 4][j % 4] = Vec::all(0.0f);
    for (std::size_t d = 0; d < width; d += Vec::kLanes) {
      Vec::F query[Q];
      for (int h = 0; h < Q; ++h) query[h] = Vec::load(q + h * width + d);
      for (std::size_t j = 0; j < kTileKeys; ++j) {
        Vec::F lanes = load_lanes(key[j] + d);
        Vec::hold(lanes);
        for (int h = 0; h < Q; ++h) sum[h][j / 4][j % 4] = Vec::fma(query[h], lanes, sum[h][j / 4][j % 4]);
      }
    }
    for (int h = 0; h < Q; ++h)
      for (std::size_t j = 0; j < kTileKeys; j += 4) Vec::store_sums(sum[h][j / 4], scores + h * kSplit + i + j);
  }
}

// out[h * step + d] = sum over i of weights[h * kSplit + i] values[offsets[i]][d], for N vectors of d; added to what `out`
// holds if `more`.
template <int Q, int N, class T>
inline void mix_columns(const float* weights, const T* values, const std::size_t* offsets, std::size_t count, float* out,
                        std::size_t step, bool more) {
  Vec::F sum[Q][N];
  for (int h = 0; h < Q; ++h)
    for (int v = 0; v < N; ++v) sum[h][v] = more ? Vec::load(out + h * step + v * Vec::kLanes) : Vec::all(0.0f);
  for (std::size_t i = 0; i < count; ++i) {
    const T* value = values + offsets[i];
    Vec::F weight[Q];
    for (int h = 0; h < Q; ++h) weight[h] = Vec::all(weights[h * kSplit + i]);
    for (int v = 0; v < N; ++v) {
      Vec::F lanes = load_lanes(value + v * Vec::kLanes);
      Vec::hold(lanes);
      for (int h = 0; h < Q; ++h) sum[h][v] = Vec::fma(weight[h], lanes, sum[h][v]);
    }
  }
  for (int h = 0; h < Q; ++h)
    for (int v = 0; v < N; ++v) Vec::store(out + h * step + v * Vec::kLanes, sum[h][v]);
}

template <int Q, class T>
void mix_tile(const float* weights, const T* values, const std::size_t* offsets, std::size_t count, std::size_t width, float* out,
              std::size_t step, bool more) {
  std::size_t d = 0;
  for (; d + 4 * Vec::kLanes <= width; d += 4 * Vec::kLanes)
    mix_columns<Q, 4>(weights, values + d, offsets, count, out + d, step, more);
  for (; d < width; d += Vec::kLanes) mix_columns<Q, 1>(weights, values + d, offsets, count, out + d, step, more);
}

// Turns products into weights e^(scale x product - largest); gives that largest and the sum of weights. The lanes past
// `count` weigh 2^-126, which is nothing beside the largest weight of 1.
inline void soften(float* scores, std::size_t count, float scale, float* largest, float* total) {
  const std::size_t padded = (count + Vec::kLanes - 1) / Vec::kLanes * Vec::kLanes;
  for (std::size_t i = count; i < padded; ++i) scores[i] = scores[count - 1];
  const Vec::F scales = Vec::all(scale);
  Vec::F most = scales * Vec::load(scores);
  for (std::size_t i = 0; i < padded; i += Vec::kLanes) {
    const Vec::F scaled = scales * Vec::load(scores + i);
    Vec::store(scores + i, scaled);
    most = Vec::max(most, scaled);
  }
  *largest = Vec::largest(most);
  for (std::size_t i = count; i < padded; ++i) scores[i] = -__builtin_inff();
  const Vec::F shift = Vec::all(*largest);
  Vec::F sum = Vec::all(0.0f);
  for (std::size_t i = 0; i < padded; i += Vec::kLanes) {
    const Vec::F weights = exponential(Vec::load(scores + i) - shift);
    Vec::store(scores + i, weights);
    sum = sum + weights;
  }
  *total = Vec::sum(sum);
}

struct AttentionTasks {
  const AttentionJob& job;
  const std::int32_t* slots;   // [rows][job.slots]: the set ancestors of each row, in order
  const std::int32_t* counts;  // [rows]: how many
  float* parts;                // [rows][heads][splits][width + 2]: sum, largest, total
  std::size_t first, last;     // rows
  std::size_t splits;
  float scale;

  float* part(std::size_t row, std::size_t head, std::size_t split) const {
    return parts + (((row - first) * job.heads + head) * splits + split) * (job.width + 2);
  }
};

// Where the positions begin that a row sees in a split, in elements.
struct Seen {
  std::size_t count;
  std::size_t offsets[kSplit];

  // Those from `first` on, kReuse at most.
  std::size_t part(std::size_t first) const { return count <= first ? 0 : count - first < kReuse ? count - first : kReuse; }
};

void find_seen(const AttentionTasks& tasks, std::size_t row, std::size_t split, Seen* seen) {
  const AttentionJob& job = tasks.job;
  const std::size_t length = static_cast<std::size_t>(job.lengths[row]);
  const std::size_t start = job.starts ? static_cast<std::size_t>(job.starts[row]) : 0;
  const std::size_t all = length + (job.slots ? static_cast<std::size_t>(tasks.counts[row]) : 0);
  const std::size_t low = split * kSplit > start ? split * kSplit : start;
  const std::size_t high = (split + 1) * kSplit < all ? (split + 1) * kSplit : all;
  seen->count = 0;
  for (std::size_t i = low; i < high; ++i) {
    const std::size_t position =
        i < length ? i : length + static_cast<std::size_t>(tasks.slots[row * job.slots + i - length]);
    seen->offsets[seen->count++] = position * job.kv_heads * job.width;
  }
}

// Some rows, Q heads from `head` on, in one split. Keys and values of kReuse positions serve all rows before the next.
template <int Q, class T>
void head_tile(const AttentionTasks& tasks, Rows rows, std::size_t head, std::size_t split, const T* keys, const T* values,
               const Seen* seen) {
  const AttentionJob& job = tasks.job;
  alignas(64) float scores[kTileRows][Q * kSplit];
  for (std::size_t i = 0; i < kSplit; i += kReuse)
    for (std::size_t r = 0; r < rows.count; ++r) {
      const float* q = job.q + (rows.first + r) * job.q_step + head * job.width;
      score_tile<Q>(q, keys, seen[r].offsets + i, seen[r].part(i), job.width, scores[r] + i);
    }
  for (std::size_t r = 0; r < rows.count; ++r)
    for (int h = 0; h < Q; ++h) {
      float* part = tasks.part(rows.first + r, head + h, split) + job.width;
      part[1] = 0.0f;
      if (seen[r].count) soften(scores[r] + h * kSplit, seen[r].count, tasks.scale, part, part + 1);
    }
  for (std::size_t i = 0; i < kSplit; i += kReuse)
    for (std::size_t r = 0; r < rows.count; ++r) {
      float* part = tasks.part(rows.first + r, head, split);
      const std::size_t count = seen[r].part(i), step = tasks.splits * (job.width + 2);
      if (count) mix_tile<Q>(scores[r] + i, values, seen[r].offsets + i, count, job.width, part, step, i > 0);
    }
}

template <class T>
void split_of_head(const AttentionTasks& tasks, std::size_t kv_head, std::size_t split) {
  const AttentionJob& job = tasks.job;
  const T* keys = static_cast<const T*>(job.keys) + kv_head * job.width;
  const T* values = static_cast<const T*>(job.values) + kv_head * job.width;
  const std::size_t group = job.heads / job.kv_heads;
  const std::size_t tiles = (group + kTileHeads - 1) / kTileHeads;
  Seen seen[kTileRows];
  for (std::size_t first = tasks.first; first < tasks.last; first += kTileRows) {
    const Rows rows{first, tasks.last - first < kTileRows ? tasks.last - first : kTileRows};
    for (std::size_t r = 0; r < rows.count; ++r) find_seen(tasks, first + r, split, seen + r);
    for (std::size_t tile = 0; tile < tiles; ++tile) {
      const std::size_t head = kv_head * group + group * tile / tiles;
      const std::size_t heads = kv_head * group + group * (tile + 1) / tiles - head;
      if (heads == 1) head_tile<1>(tasks, rows, head, split, keys, values, seen);
      if (heads == 2) head_tile<2>(tasks, rows, head, split, keys, values, seen);
      if (heads == 3) head_tile<3>(tasks, rows, head, split, keys, values, seen);
    }
  }
}

void attention_task(const void* tasks_pointer, std::size_t index) {
  const AttentionTasks& tasks = *static_cast<const AttentionTasks*>(tasks_pointer);
  if (tasks.job.dtype == Dtype::kF32) {
    split_of_head<float>(tasks, index % tasks.job.kv_heads, index / tasks.job.kv_heads);
  } else {
    split_of_head<std::uint16_t>(tasks, index % tasks.job.kv_heads, index / tasks.job.kv_heads);
  }
}

void merge_head(const AttentionTasks& tasks, std::size_t row, std::size_t head) {
  const std::size_t width = tasks.job.width;
  float* out = tasks.job.out + (row * tasks.job.heads + head) * width;
  float largest = 0.0f;
  bool any = false;
  for (std::size_t split = 0; split < tasks.splits; ++split) {
    const float* part = tasks.part(row, head, split);
    if (part[width + 1] > 0.0f && (!any || part[width] > largest)) {
      largest = part[width];
      any = true;
    }
  }
  float total = 0.0f;
  for (std::size_t d = 0; d < width; ++d) out[d] = 0.0f;
  for (std::size_t split = 0; split < tasks.splits; ++split) {
    const float* part = tasks.part(row, head, split);
    if (!(part[width + 1] > 0.0f)) continue;
    const float factor = exponential(part[width] - largest);
    const Vec::F factors = Vec::all(factor);
    total += factor * part[width + 1];
    for (std::size_t d = 0; d < width; d += Vec::kLanes)
      Vec::store(out + d, Vec::fma(factors, Vec::load(part + d), Vec::load(out + d)));
  }
  const Vec::F divisor = Vec::all(total);
  for (std::size_t d = 0; d < width; d += Vec::kLanes) Vec::store(out + d, Vec::load(out + d) / divisor);
}

void merge_task(const void* tasks_pointer, std::size_t index) {
  const AttentionTasks& tasks = *static_cast<const AttentionTasks*>(tasks_pointer);
  for (std::size_t head = 0; head < tasks.job.heads; ++head) merge_head(tasks, tasks.first + index, head);
}

// Positions that row `row` sees, counted from 0 (a start hides some of them).
std::size_t list_ancestors(const AttentionJob& job, std::size_t row, std::int32_t* slots, std::int32_t* count) {
  std::int32_t found = 0;
  for (std::size_t s = 0; s < job.slots; ++s)
    if (job.ancestors[row * job.slots + s]) slots[found++] = static_cast<std::int32_t>(s);
  *count = found;
  return static_cast<std::size_t>(job.lengths[row]) + static_cast<std::size_t>(found);
}

void attend_rows(const AttentionJob& job, std::size_t first, std::size_t last, std::int32_t* slots, std::int32_t* counts,
                 Scratch& scratch) {
  std::size_t longest = 0;
  for (std::size_t row = first; row < last; ++row) {
    const std::size_t all = list_ancestors(job, row, slots + row * job.slots, counts + row);
    longest = all > longest ? all : longest;
  }
  const std::size_t splits = (longest + kSplit - 1) / kSplit;
  const std::size_t floats = (last - first) * job.heads * splits * (job.width + 2);
  float* parts = static_cast<float*>(scratch.room(1, floats * sizeof(float)));
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(job.width));
  const AttentionTasks tasks{job, slots, counts, parts, first, last, splits, scale};
  run_tasks(splits * job.kv_heads, attention_task, &tasks);
  if (floats > kMergeAlone) {
    run_tasks(last - first, merge_task, &tasks);
  } else {
    for (std::size_t row = first; row < last; ++row) merge_task(&tasks, row - first);
  }
}

void attention(const AttentionJob& job) {
  Scratch& scratch = Scratch::of_thread();
  const std::size_t bytes = job.rows * (job.slots + 1) * sizeof(std::int32_t);
  std::int32_t* counts = static_cast<std::int32_t*>(scratch.room(0, bytes));
  for (std::size_t first = 0; first < job.rows; first += kRowBlock) {
    const std::size_t last = first + kRowBlock < job.rows ? first + kRowBlock : job.rows;
    attend_rows(job, first, last, counts + job.rows, counts, scratch);
  }
}

}  // namespace
}  // namespace outrider
