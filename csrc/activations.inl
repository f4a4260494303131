// Activations as 8-bit codes, by row and group of 32 inputs.

namespace outrider {
namespace {

constexpr std::size_t kQuantiseGroups = 256;  // of a task

// Activations of a block of R rows, group by group of 32 inputs: codes [group][row][32] in [-127, 127],
// scales [group][row], and sums of codes, times the scale, or times the number that stands for zero in the weights' codes
// (sums of halves: [group][half][row]).
struct Activations {
  const std::int8_t* codes;
  const float* scales;
  const float* scaled_sums;
  const std::int32_t* zero_sums;
  const std::int32_t* zero_half_sums;
};

struct QuantiseJob {
  const float* x;
  std::int8_t* codes;
  float* scales;
  float* scaled_sums;
  std::int32_t* zero_sums;
  std::int32_t* zero_half_sums;
  std::size_t rows, k, chunks, most;
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
  const Rows rows = block_rows(job.rows, job.most, index / job.chunks);
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

// Blocks of at most `most` rows, one behind the other. As much memory as one block's group takes may be read behind the codes.
Activations quantise(const QuantLinearJob& job, int zero, std::size_t most) {
  const std::size_t groups = job.rows * (job.k / 32), chunks = (job.k / 32 + kQuantiseGroups - 1) / kQuantiseGroups;
  const std::size_t bytes = 32 * (groups + most);
  std::int8_t* codes = static_cast<std::int8_t*>(Scratch::of_thread().room(0, bytes + 5 * sizeof(float) * groups));
  float* scales = reinterpret_cast<float*>(codes + bytes);
  std::int32_t* sums = reinterpret_cast<std::int32_t*>(scales + 2 * groups);
  const QuantiseJob made{job.x, codes, scales, scales + groups, sums, sums + groups, job.rows, job.k, chunks, most, zero};
  run_tasks(blocks_of(job.rows, most) * chunks, quantise_task, &made);
  return Activations{codes, made.scales, made.scaled_sums, made.zero_sums, made.zero_half_sums};
}

}  // namespace
}  // namespace outrider
