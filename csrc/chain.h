// Draft tokens of a head of one layer that goes on with its own output: all tokens of a draft in one call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "stack.h"

namespace outrider {

// What a row is made of: the norm of a token's embedding, and the norm of what the row before hands on.
struct ChainShape {
  std::size_t hidden;
  float eps;
  const float* embedded_norm;
  const float* handed_norm;
  // With a joint matrix, which reads both side by side: the norm of what it gives, which it is added to. Else the layer reads
  // both side by side, and adds to what was handed on, or to its norm.
  const float* joint_norm;
  bool adds_to_norm;
  bool hands_norm;  // whether the norm of the layer's output is handed on, or that itself
};

// The embeddings of tokens: row r of token t with r = row_of[t] (t where row_of is null); none where that is negative.
struct ChainTable {
  const float* rows;
  const std::int32_t* row_of;
  std::size_t tokens;
};

// One sequence. The keys and values of its rows go into `store` [keys, values][positions][kv_heads][width] from `length` on;
// the cache's first row is that of position `first`, and a row sees the last `window` positions.
struct ChainSpan {
  std::size_t rows;  // before the first token
  void* store;
  std::size_t positions, length;
  std::int64_t first;
  std::size_t window, limit;  // of tokens
  std::vector<std::int64_t> stops;  // tokens behind which nothing follows
  double least;                     // nor does anything where the product of their rows' largest probabilities is smaller
  float temperature;                // 0: the likeliest tokens; else each is drawn
  std::vector<double> uniforms;     // with its own of these: where the running sum of the probabilities exceeds it
  std::int64_t* text;               // its tokens, the last of which is embedded in the last row, and room for those found
  std::size_t text_size;
  double copy;                      // added to the logit of the token that `find_copy` finds, for each token but one matched
};

struct ChainPass {
  const float* embedded;  // [rows of all sequences][hidden]
  const float* handed;    // [rows of all sequences][hidden]
  const float* cos;
  const float* sin;
  std::vector<ChainSpan> spans;
  std::size_t most;      // the largest limit
  std::int64_t* tokens;  // [sequences][most]; negative where a logit is not finite, and nothing follows
  double* shares;        // [sequences][most]: the largest probabilities of their rows
  double* weights;       // [sequences][most][columns]: the rows that were drawn from; may be null where none is
  std::int64_t* counts;  // [sequences]: tokens found
  float* carried;        // [sequences][hidden]: what the last row hands on
};

// So many tokens are compared at most.
constexpr std::size_t kMostCopied = 5;

class Chain {
 public:
  // `stack` is one layer that reads what it is given. Column c of the logits stands for token ids[c] (ascending).
  Chain(const Stack& stack, const ChainShape& shape, const ChainTable& table, const std::int64_t* ids)
      : stack_(&stack), shape_(shape), table_(table), ids_(ids) {}

  void set_head(const Matrix& matrix) { head_ = matrix; }
  void set_joint(const Matrix& matrix) { joint_ = matrix; }

  const Kernels& kernels() const { return stack_->kernels(); }
  std::size_t row_work() const { return stack_->row_work() + head_.n * head_.k + joint_.n * joint_.k; }

  // Ends with the first token behind which a sequence should go on and whose embedding the table lacks. The caller has
  // checked sizes and values. Any number of threads may run one chain.
  void run(const ChainPass& pass) const;

 private:
  struct Buffers;
  struct Step;
  void read(const Step& step, const Buffers& to) const;
  void run_layer(const Step& step, const Buffers& to) const;
  void add_copy(const ChainSpan& span, std::size_t found, float* row) const;
  void choose(const Step& step, const Buffers& to) const;
  bool advance(Step& step) const;
  const float* embedding(std::int64_t token) const;

  const Stack* stack_;
  ChainShape shape_;
  ChainTable table_;
  const std::int64_t* ids_;
  Matrix head_{}, joint_{};
};

}  // namespace outrider
