// Greedy draft tokens along rows of logits, to which each token adds what it says of the next: all of them in one call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "stack.h"

namespace outrider {

// What a sequence adds of its own behind token t: to `ways` columns the numbers of row row_of[t], if that is not negative.
struct WalkPairs {
  const std::int32_t* row_of;   // [tokens]; null: nothing
  const std::int64_t* columns;  // [rows][ways]
  const float* values;
};

struct WalkPass {
  float* logits;                // [rows of all sequences][size]: what is added stays
  std::size_t sequences, ways;
  const std::int64_t* counts;   // rows of each sequence; they follow one another
  std::int64_t* before;         // the token before each sequence's first row; ends as its last token
  const WalkPairs* pairs;       // of each sequence
  std::int64_t* columns;        // [rows]: the likeliest column, the first of equals
  float* tops;                  // [rows]: its logit; not a number where a number of the row is not finite
  float* shares;                // [rows]: its probability; null: not asked for
};

class Walker {
 public:
  // Column c stands for token ids[c], or c where ids is null. A token's row of `table` [tokens][rank] is what the matrix reads.
  Walker(const Kernels& kernels, std::size_t size, std::size_t tokens, const std::int64_t* ids, const float* table)
      : kernels_(&kernels), size_(size), tokens_(tokens), ids_(ids), table_(table) {}

  // `size` outputs; without it nothing but pairs is added.
  void set_matrix(const Matrix& matrix) { matrix_ = matrix; }

  const Kernels& kernels() const { return *kernels_; }
  std::size_t row_work() const { return size_ * (matrix_.k + 1); }

  // Throws std::out_of_range for a token or column that is not there.
  void run(const WalkPass& pass) const;

 private:
  struct Step;
  void add_pairs(const WalkPass& pass, std::size_t sequence, float* row) const;
  void advance(const WalkPass& pass, const Step& step) const;

  const Kernels* kernels_;
  std::size_t size_, tokens_;
  const std::int64_t* ids_;
  const float* table_;
  Matrix matrix_{};
};

}  // namespace outrider
