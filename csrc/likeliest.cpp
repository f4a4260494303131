#include "likeliest.h"

#include "pool.h"

#include "vec_portable.h"

#include "rows.inl"

namespace outrider {
namespace {

// Rows are far from being where time goes: four lanes do, and every level finds the same numbers.

constexpr std::size_t kFindColumns = 256;  // whose largest is looked for together

}  // namespace

Likeliest find_likeliest(const float* row, std::size_t size) {
  float top = -__builtin_inff(), lost_at_edges = 0.0f;
  std::size_t place = 0;
  Vec::F lost = Vec::all(0.0f);  // x - x: not a number where x is not finite
  for (std::size_t first = 0; first < size; first += kFindColumns) {
    const std::size_t last = first + kFindColumns < size ? first + kFindColumns : size;
    const std::size_t whole = first + (last - first) / Vec::kLanes * Vec::kLanes;
    Vec::F most = Vec::all(-__builtin_inff());
    for (std::size_t i = first; i < whole; i += Vec::kLanes) {
      const Vec::F value = Vec::load(row + i);
      most = Vec::max(most, value);
      lost = lost + (value - value);
    }
    float largest = Vec::largest(most);
    for (std::size_t i = whole; i < last; ++i) {
      lost_at_edges += row[i] - row[i];
      if (row[i] > largest) largest = row[i];
    }
    if (largest > top) {
      top = largest;
      place = first;
    }
  }
  if (!(Vec::sum(lost) + lost_at_edges == 0.0f)) return {0, __builtin_nanf("")};
  while (row[place] != top) ++place;
  return {place, top};
}

float share_of(float top, const float* row, std::size_t size) {
  const std::size_t whole = size / Vec::kLanes * Vec::kLanes;
  Vec::F sums = Vec::all(0.0f);
  for (std::size_t i = 0; i < whole; i += Vec::kLanes) sums = sums + exponential(Vec::load(row + i) - Vec::all(top));
  float sum = Vec::sum(sums);
  for (std::size_t i = whole; i < size; ++i) sum += exponential(row[i] - top);
  return 1.0f / sum;
}

bool softmax(const float* row, double* out, std::size_t size, float temperature) {
  const float top = find_likeliest(row, size).top;
  if (top != top) return false;
  const float factor = 1.0f / (temperature > 1e-30f ? temperature : 1e-30f);
  const std::size_t whole = size / Vec::kLanes * Vec::kLanes, eights = size / 8 * 8;
  for (std::size_t i = 0; i < whole; i += Vec::kLanes) {
    float lanes[Vec::kLanes];
    Vec::store(lanes, exponential((Vec::load(row + i) - Vec::all(top)) * Vec::all(factor)));
    for (int j = 0; j < Vec::kLanes; ++j) out[i + j] = lanes[j];
  }
  for (std::size_t i = whole; i < size; ++i) out[i] = exponential((row[i] - top) * factor);
  double parts[8] = {};
  for (std::size_t i = 0; i < eights; i += 8)
    for (int j = 0; j < 8; ++j) parts[j] += out[i + j];
  for (std::size_t i = eights; i < size; ++i) parts[i - eights] += out[i];
  const double scale = 1.0 / (((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7])));
  for (std::size_t i = 0; i < size; ++i) out[i] *= scale;
  return true;
}

}  // namespace outrider
