#include "chain.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "copies.h"
#include "likeliest.h"
#include "pool.h"
#include "scratch.h"

namespace outrider {

// Of all rows of a step; the first has the most.
struct Chain::Buffers {
  float* both;      // [rows][norm of the embedding, norm of what is handed on][hidden]
  float* residual;  // [rows][hidden]
  float* read;      // [rows][hidden]: what the layer reads, if it is not `both`
  float* normed;    // [rows][hidden]: the norm of the layer's output
  float* last;      // [sequences][hidden]: that of each sequence's last row
  float* logits;    // [sequences][columns]

  static std::size_t floats(std::size_t rows, std::size_t sequences, std::size_t hidden, std::size_t columns) {
    return 5 * rows * hidden + sequences * (hidden + columns);
  }

  Buffers(float* memory, std::size_t rows, std::size_t sequences, std::size_t hidden)
      : both(memory),
        residual(both + 2 * rows * hidden),
        read(residual + rows * hidden),
        normed(read + rows * hidden),
        last(normed + rows * hidden),
        logits(last + sequences * hidden) {}
};

// The rows of the sequences that go on: at first those that they came with, later that of the latest token.
struct Chain::Step {
  const ChainPass& pass;
  std::vector<std::size_t> sequences;
  std::vector<std::size_t> rows;          // of each of them
  std::vector<std::size_t> lengths;       // of their caches
  std::vector<const float*> embedded, handed;  // of each row
  std::vector<double> products;           // of the probabilities of each one's tokens
  std::size_t number;                     // tokens that they have
};

namespace {

struct Choice {
  bool finite;
  std::size_t column;
  double share;  // the largest probability of the row
};

Choice likeliest(const float* row, std::size_t size) {
  const Likeliest found = find_likeliest(row, size);
  if (found.top != found.top) return {false, 0, 0.0};
  return {true, found.column, share_of(found.top, row, size)};
}

Choice drawn(const float* row, double* weights, std::size_t size, float temperature, double uniform) {
  if (!softmax(row, weights, size, temperature)) return {false, 0, 0.0};
  double sum = 0.0, largest = 0.0;
  std::size_t last = 0;
  for (std::size_t i = 0; i < size; ++i) {
    sum += weights[i];
    largest = std::max(largest, weights[i]);
    if (weights[i] > 0.0) last = i;
  }
  const double threshold = uniform * sum;
  double running = 0.0;
  for (std::size_t i = 0; i < size; ++i) {
    running += weights[i];
    if (running > threshold) return {true, i, largest};
  }
  return {true, last, largest};
}

}  // namespace

const float* Chain::embedding(std::int64_t token) const {
  const std::int64_t row = table_.row_of ? table_.row_of[token] : token;
  return row < 0 ? nullptr : table_.rows + static_cast<std::size_t>(row) * shape_.hidden;
}

void Chain::read(const Step& step, const Buffers& to) const {
  const std::size_t rows = step.embedded.size(), hidden = shape_.hidden, bytes = hidden * sizeof(float);
  for (std::size_t row = 0; row < rows; ++row) {
    float* embedded = to.both + 2 * row * hidden;
    float* handed = embedded + hidden;
    float* residual = to.residual + row * hidden;
    std::memcpy(embedded, step.embedded[row], bytes);
    std::memcpy(handed, step.handed[row], bytes);
    std::memcpy(residual, step.handed[row], bytes);
    kernels().rms_norm(embedded, nullptr, shape_.embedded_norm, embedded, 1, hidden, shape_.eps);
    kernels().rms_norm(handed, nullptr, shape_.handed_norm, handed, 1, hidden, shape_.eps);
    if (shape_.adds_to_norm) std::memcpy(residual, handed, bytes);
  }
  if (!joint_.packed) return;
  multiply(kernels(), joint_, to.both, to.residual, rows, hidden);
  kernels().rms_norm(to.residual, nullptr, shape_.joint_norm, to.read, rows, hidden, shape_.eps);
}

// Also what each sequence's last row says and hands on.
void Chain::run_layer(const Step& step, const Buffers& to) const {
  const std::size_t rows = step.embedded.size(), hidden = shape_.hidden;
  std::vector<std::int64_t> positions;
  std::vector<std::int32_t> seen, starts;
  StackPass pass{to.residual, to.normed, rows, step.pass.cos, step.pass.sin, nullptr, {}, {}, nullptr,
                 joint_.packed ? to.read : to.both};
  for (std::size_t i = 0; i < step.sequences.size(); ++i) {
    const ChainSpan& span = step.pass.spans[step.sequences[i]];
    for (std::size_t row = 0; row < step.rows[i]; ++row) {
      const std::size_t end = step.lengths[i] + row + 1;
      positions.push_back(span.first + static_cast<std::int64_t>(end - 1));
      seen.push_back(static_cast<std::int32_t>(end));
      starts.push_back(static_cast<std::int32_t>(end > span.window ? end - span.window : 0));
    }
  }
  pass.positions = positions.data();
  std::size_t first = 0;
  for (std::size_t i = 0; i < step.sequences.size(); first += step.rows[i++]) {
    const ChainSpan& span = step.pass.spans[step.sequences[i]];
    pass.spans.push_back(
        {step.rows[i], span.store, span.positions, step.lengths[i], seen.data() + first, starts.data() + first, nullptr});
  }
  stack_->run(pass);
  std::size_t end = 0;
  for (std::size_t i = 0; i < step.sequences.size(); ++i) {
    end += step.rows[i];
    const std::size_t at = (end - 1) * hidden, bytes = hidden * sizeof(float);
    std::memcpy(to.last + i * hidden, to.normed + at, bytes);
    const float* handed = shape_.hands_norm ? to.normed : to.residual;
    std::memcpy(step.pass.carried + step.sequences[i] * hidden, handed + at, bytes);
  }
}

// `found` tokens of the draft stand behind the text.
void Chain::add_copy(const ChainSpan& span, std::size_t found, float* row) const {
  const Copy copy = find_copy(span.text, span.text_size + found, kMostCopied);
  if (copy.matched < 2) return;
  const std::int64_t* end = ids_ + head_.n;
  const std::int64_t* at = std::lower_bound(ids_, end, copy.token);
  if (at != end && *at == copy.token) row[at - ids_] += static_cast<float>(span.copy * static_cast<double>(copy.matched - 1));
}

void Chain::choose(const Step& step, const Buffers& to) const {
  struct Job {
    const Chain& chain;
    const Step& step;
    float* logits;
  };
  const Job all{*this, step, to.logits};
  const Task task = [](const void* job, std::size_t i) {
    const Job& own = *static_cast<const Job*>(job);
    const ChainPass& pass = own.step.pass;
    const std::size_t size = own.chain.head_.n, sequence = own.step.sequences[i];
    float* row = own.logits + i * size;
    const std::size_t place = sequence * pass.most + own.step.number;
    const ChainSpan& span = pass.spans[sequence];
    if (span.copy > 0.0) own.chain.add_copy(span, own.step.number, row);
    const Choice choice = span.temperature > 0.0f
                              ? drawn(row, pass.weights + place * size, size, span.temperature, span.uniforms[own.step.number])
                              : likeliest(row, size);
    pass.tokens[place] = choice.finite ? own.chain.ids_[choice.column] : -1;
    pass.shares[place] = choice.share;
    pass.counts[sequence] = static_cast<std::int64_t>(own.step.number + 1);
  };
  run_tasks(step.sequences.size(), task, &all);
}

// Turns to the rows of the tokens just found; false where nothing goes on, or a token's embedding is not there.
bool Chain::advance(Step& step) const {
  std::vector<std::size_t> sequences, lengths;
  std::vector<double> products;
  step.embedded.clear();
  step.handed.clear();
  for (std::size_t i = 0; i < step.sequences.size(); ++i) {
    const std::size_t sequence = step.sequences[i], place = sequence * step.pass.most + step.number;
    const ChainSpan& span = step.pass.spans[sequence];
    const std::int64_t token = step.pass.tokens[place];
    const double product = step.products[i] * step.pass.shares[place];
    const bool sure = product >= span.least;
    const bool stops = std::find(span.stops.begin(), span.stops.end(), token) != span.stops.end();
    if (token < 0 || !sure || stops || step.number + 1 >= span.limit) continue;
    if (span.copy > 0.0) span.text[span.text_size + step.number] = token;
    sequences.push_back(sequence);
    lengths.push_back(step.lengths[i] + step.rows[i]);
    products.push_back(product);
    step.embedded.push_back(embedding(token));
    step.handed.push_back(step.pass.carried + sequence * shape_.hidden);
  }
  step.sequences = sequences;
  step.lengths = lengths;
  step.products = products;
  step.rows.assign(sequences.size(), 1);
  ++step.number;
  return !sequences.empty() && std::find(step.embedded.begin(), step.embedded.end(), nullptr) == step.embedded.end();
}

void Chain::run(const ChainPass& pass) const {
  Step step{pass, {}, {}, {}, {}, {}, std::vector<double>(pass.spans.size(), 1.0), 0};
  std::size_t rows = 0;
  for (const ChainSpan& span : pass.spans) {
    step.sequences.push_back(step.sequences.size());
    step.rows.push_back(span.rows);
    step.lengths.push_back(span.length);
    for (std::size_t row = 0; row < span.rows; ++row, ++rows) {
      step.embedded.push_back(pass.embedded + rows * shape_.hidden);
      step.handed.push_back(pass.handed + rows * shape_.hidden);
    }
  }
  const std::size_t floats = Buffers::floats(rows, pass.spans.size(), shape_.hidden, head_.n);
  const Buffers to(static_cast<float*>(Scratch::of_thread().room(3, floats * sizeof(float))), rows, pass.spans.size(), shape_.hidden);
  do {
    read(step, to);
    run_layer(step, to);
    multiply(kernels(), head_, to.last, to.logits, step.sequences.size(), head_.n);
    choose(step, to);
  } while (advance(step));
}

}  // namespace outrider
