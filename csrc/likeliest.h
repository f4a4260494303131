// What a token is chosen by: the largest number of a row of logits, its probability, and the softmax of all.
#pragma once

#include <cstddef>

namespace outrider {

// Of a row: the first of the largest numbers, and that number, not a number where one of the row is not finite.
struct Likeliest {
  std::size_t column;
  float top;
};

Likeliest find_likeliest(const float* row, std::size_t size);

// The probability of the likeliest, whose number is `top`.
float share_of(float top, const float* row, std::size_t size);

// out = softmax(row / temperature) with exponentials in float32; false where a number of the row is not finite, and `out` is then
// left as it is.
bool softmax(const float* row, double* out, std::size_t size, float temperature);

}  // namespace outrider
