#include "walk.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "pool.h"

#include "vec_portable.h"

#include "rows.inl"

namespace outrider {
namespace {

// Of a row: the first of the largest numbers, and that number, not a number where one of the row is not finite.
struct Likeliest {
  std::size_t column;
  float top;
};

// Rows are far from being where time goes: four lanes do, and every level finds the same numbers.

constexpr std::size_t kFindColumns = 256;  // whose largest is looked for together

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

// The probability of the likeliest, whose number is `top`.
float share_of(float top, const float* row, std::size_t size) {
  const std::size_t whole = size / Vec::kLanes * Vec::kLanes;
  Vec::F sums = Vec::all(0.0f);
  for (std::size_t i = 0; i < whole; i += Vec::kLanes) sums = sums + exponential(Vec::load(row + i) - Vec::all(top));
  float sum = Vec::sum(sums);
  for (std::size_t i = whole; i < size; ++i) sum += exponential(row[i] - top);
  return 1.0f / sum;
}

// y[row] = the matrix times x[row]; rows of y are `size` apart.
void multiply(const Kernels& kernels, const Matrix& matrix, const float* x, float* y, std::size_t rows, std::size_t size) {
  if (matrix.panel_bytes) {
    const std::uint8_t* packed = static_cast<const std::uint8_t*>(matrix.packed);
    return kernels.quant_linear({packed, matrix.bias, x, y, rows, matrix.n, matrix.k, size, matrix.panel_bytes, matrix.type});
  }
  kernels.linear({matrix.packed, matrix.bias, x, y, rows, matrix.n, matrix.k, size, matrix.dtype});
}

}  // namespace

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

// One row of every sequence that has one more.
struct Walker::Step {
  const Walker& walker;
  const WalkPass& pass;
  std::vector<std::size_t> sequences, rows;
  const float* added;  // [sequences][size], or null
};

void Walker::add_pairs(const WalkPass& pass, std::size_t sequence, float* row) const {
  const WalkPairs& pairs = pass.pairs[sequence];
  const std::int32_t found = pairs.row_of ? pairs.row_of[pass.before[sequence]] : -1;
  if (found < 0) return;
  const std::size_t first = static_cast<std::size_t>(found) * pass.ways;
  for (std::size_t i = first; i < first + pass.ways; ++i) {
    const std::int64_t column = pairs.columns[i];
    if (column < 0 || static_cast<std::size_t>(column) >= size_) throw std::out_of_range("a pair's column is outside the row");
    row[column] += pairs.values[i];
  }
}

void Walker::advance(const WalkPass& pass, const Step& step) const {
  const Task task = [](const void* job, std::size_t i) {
    const Step& step = *static_cast<const Step*>(job);
    const WalkPass& pass = step.pass;
    const std::size_t row = step.rows[i], size = step.walker.size_;
    float* logits = pass.logits + row * size;
    for (std::size_t c = 0; c < size && step.added; ++c) logits[c] += step.added[i * size + c];
    const Likeliest found = find_likeliest(logits, size);
    pass.columns[row] = static_cast<std::int64_t>(found.column);
    pass.tops[row] = found.top;
    if (pass.shares) pass.shares[row] = share_of(found.top, logits, size);
  };
  run_tasks(step.rows.size(), task, &step);
  for (std::size_t i = 0; i < step.rows.size(); ++i) {
    const std::int64_t column = pass.columns[step.rows[i]];
    pass.before[step.sequences[i]] = ids_ ? ids_[column] : column;
  }
}

void Walker::run(const WalkPass& pass) const {
  std::vector<std::size_t> firsts(pass.sequences, 0);
  for (std::size_t s = 1; s < pass.sequences; ++s) firsts[s] = firsts[s - 1] + static_cast<std::size_t>(pass.counts[s - 1]);
  const std::size_t rank = matrix_.packed ? matrix_.k : 0;
  const std::unique_ptr<float[]> memory(new float[pass.sequences * (rank ? rank + size_ : 0)]);
  float* read = memory.get();
  float* added = read + pass.sequences * rank;
  for (std::int64_t number = 0;; ++number) {
    Step step{*this, pass, {}, {}, rank ? added : nullptr};
    for (std::size_t s = 0; s < pass.sequences; ++s) {
      if (number >= pass.counts[s]) continue;
      const std::int64_t token = pass.before[s];
      if (token < 0 || static_cast<std::size_t>(token) >= tokens_)
        throw std::out_of_range("token " + std::to_string(token) + " is outside the table");
      const std::size_t row = firsts[s] + static_cast<std::size_t>(number);
      std::copy_n(table_ + static_cast<std::size_t>(token) * rank, rank, read + step.rows.size() * rank);
      add_pairs(pass, s, pass.logits + row * size_);
      step.sequences.push_back(s);
      step.rows.push_back(row);
    }
    if (step.rows.empty()) return;
    if (rank) multiply(*kernels_, matrix_, read, added, step.rows.size(), size_);
    advance(pass, step);
  }
}

}  // namespace outrider
