#include "walk.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "likeliest.h"
#include "pool.h"

namespace outrider {

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
