// Attention of few query rows over a long cache, in float32; keys and values float32 or bfloat16.
//
// What a row sees is cut into splits of kSplit positions, counted from position 0, with a softmax of its own each
// (Dao et al. 2022, 2205.14135, section 3.1); the splits are then merged in order. A task is one split of one kv head.

namespace outrider {
namespace {

constexpr std::size_t kSplit = 128;
constexpr std::size_t kTileHeads = 3;
constexpr std::size_t kRowBlock = 64;
constexpr std::size_t kMergeAlone = 65536;

inline Vec::F load_lanes(const float* p) { return Vec::load(p); }
inline Vec::F load_lanes(const std::uint16_t* p) { return Vec::bf16(p); }

// scores[h * kSplit + i] = q[h] . keys[offsets[i]], for Q heads of one row; fills whole fours.
template <int Q, class T>
void score_tile(const float* q, const T* keys, const std::size_t* offsets, std::size_t count, std::size_t width,
                float* scores) {
  for (std::size_t i = 0; i < count; i += 4) {
    const T* key[4];
    for (std::size_t j = 0; j < 4; ++j) key[j] = keys + offsets[i + j < count ? i + j : count - 1];
    Vec::F sum[Q][4];
    for (int h = 0; h < Q; ++h)
      for (int j = 0; j < 4; ++j) sum[h][j] = Vec::all(0.0f);
    for (std::size_t d = 0; d < width; d += Vec::kLanes) {
      Vec::F query[Q];
      for (int h = 0; h < Q; ++h) query[h] = Vec::load(q + h * width + d);
      for (int j = 0; j < 4; ++j) {
        const Vec::F lanes = load_lanes(key[j] + d);
        for (int h = 0; h < Q; ++h) sum[h][j] = Vec::fma(query[h], lanes, sum[h][j]);
      }
    }
    for (int h = 0; h < Q; ++h) Vec::store_sums(sum[h], scores + h * kSplit + i);
  }
}

// out[h * step + d] = sum over i of weights[h * kSplit + i] values[offsets[i]][d], for N vectors of d.
template <int Q, int N, class T>
inline void mix_columns(const float* weights, const T* values, const std::size_t* offsets, std::size_t count, float* out,
                        std::size_t step) {
  Vec::F sum[Q][N];
  for (int h = 0; h < Q; ++h)
    for (int v = 0; v < N; ++v) sum[h][v] = Vec::all(0.0f);
  for (std::size_t i = 0; i < count; ++i) {
    const T* value = values + offsets[i];
    Vec::F weight[Q];
    for (int h = 0; h < Q; ++h) weight[h] = Vec::all(weights[h * kSplit + i]);
    for (int v = 0; v < N; ++v) {
      const Vec::F lanes = load_lanes(value + v * Vec::kLanes);
      for (int h = 0; h < Q; ++h) sum[h][v] = Vec::fma(weight[h], lanes, sum[h][v]);
    }
  }
  for (int h = 0; h < Q; ++h)
    for (int v = 0; v < N; ++v) Vec::store(out + h * step + v * Vec::kLanes, sum[h][v]);
}

template <int Q, class T>
void mix_tile(const float* weights, const T* values, const std::size_t* offsets, std::size_t count, std::size_t width, float* out,
              std::size_t step) {
  std::size_t d = 0;
  for (; d + 4 * Vec::kLanes <= width; d += 4 * Vec::kLanes)
    mix_columns<Q, 4>(weights, values + d, offsets, count, out + d, step);
  for (; d < width; d += Vec::kLanes) mix_columns<Q, 1>(weights, values + d, offsets, count, out + d, step);
}

// Turns products into weights e^(scale x product - largest); gives that largest and the sum of weights.
inline void soften(float* scores, std::size_t count, float scale, float* largest, float* total) {
  const std::size_t padded = (count + Vec::kLanes - 1) / Vec::kLanes * Vec::kLanes;
  for (std::size_t i = count; i < padded; ++i) scores[i] = scores[count - 1];
  const Vec::F scales = Vec::all(scale);
  for (std::size_t i = 0; i < padded; i += Vec::kLanes) Vec::store(scores + i, scales * Vec::load(scores + i));
  Vec::F most = Vec::load(scores);
  for (std::size_t i = Vec::kLanes; i < padded; i += Vec::kLanes) most = Vec::max(most, Vec::load(scores + i));
  *largest = Vec::largest(most);
  const Vec::F shift = Vec::all(*largest);
  for (std::size_t i = 0; i < padded; i += Vec::kLanes) Vec::store(scores + i, exponential(Vec::load(scores + i) - shift));
  for (std::size_t i = count; i < padded; ++i) scores[i] = 0.0f;
  Vec::F sum = Vec::all(0.0f);
  for (std::size_t i = 0; i < padded; i += Vec::kLanes) sum = sum + Vec::load(scores + i);
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

// Fills `offsets` with the elements where the positions of this row in this split begin; returns how many.
std::size_t seen(const AttentionTasks& tasks, std::size_t row, std::size_t split, std::size_t* offsets) {
  const AttentionJob& job = tasks.job;
  const std::size_t length = static_cast<std::size_t>(job.lengths[row]);
  const std::size_t start = job.starts ? static_cast<std::size_t>(job.starts[row]) : 0;
  const std::size_t all = length + (job.slots ? static_cast<std::size_t>(tasks.counts[row]) : 0);
  const std::size_t low = split * kSplit > start ? split * kSplit : start;
  const std::size_t high = (split + 1) * kSplit < all ? (split + 1) * kSplit : all;
  std::size_t count = 0;
  for (std::size_t i = low; i < high; ++i) {
    const std::size_t position =
        i < length ? i : length + static_cast<std::size_t>(tasks.slots[row * job.slots + i - length]);
    offsets[count++] = position * job.kv_heads * job.width;
  }
  return count;
}

template <int Q, class T>
void head_tile(const AttentionTasks& tasks, std::size_t row, std::size_t head, std::size_t split, const T* keys, const T* values,
               const std::size_t* offsets, std::size_t count) {
  const AttentionJob& job = tasks.job;
  alignas(64) float scores[Q * kSplit];
  const float* q = job.q + row * job.q_step + head * job.width;
  score_tile<Q>(q, keys, offsets, count, job.width, scores);
  for (int h = 0; h < Q; ++h) {
    float* part = tasks.part(row, head + h, split);
    soften(scores + h * kSplit, count, tasks.scale, part + job.width, part + job.width + 1);
  }
  mix_tile<Q>(scores, values, offsets, count, job.width, tasks.part(row, head, split), tasks.splits * (job.width + 2));
}

template <class T>
void split_of_head(const AttentionTasks& tasks, std::size_t kv_head, std::size_t split) {
  const AttentionJob& job = tasks.job;
  const T* keys = static_cast<const T*>(job.keys) + kv_head * job.width;
  const T* values = static_cast<const T*>(job.values) + kv_head * job.width;
  const std::size_t group = job.heads / job.kv_heads;
  const std::size_t tiles = (group + kTileHeads - 1) / kTileHeads;
  std::size_t offsets[kSplit];
  for (std::size_t row = tasks.first; row < tasks.last; ++row) {
    const std::size_t count = seen(tasks, row, split, offsets);
    if (count == 0) {
      for (std::size_t h = 0; h < group; ++h) tasks.part(row, kv_head * group + h, split)[job.width + 1] = 0.0f;
      continue;
    }
    for (std::size_t tile = 0; tile < tiles; ++tile) {
      const std::size_t head = kv_head * group + group * tile / tiles;
      const std::size_t heads = kv_head * group + group * (tile + 1) / tiles - head;
      if (heads == 1) head_tile<1>(tasks, row, head, split, keys, values, offsets, count);
      if (heads == 2) head_tile<2>(tasks, row, head, split, keys, values, offsets, count);
      if (heads == 3) head_tile<3>(tasks, row, head, split, keys, values, offsets, count);
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
