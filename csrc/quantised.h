// Weights of GGUF files in the kernels' order, the same numbers bit for bit.
//
// A panel is P output columns, two vectors of 32-bit lanes. Of a panel, inputs come in blocks (32 inputs, or 256 for the K
// types): the head of a block, then for each group of 32 inputs its scales, then its codes:
//
//   type         code bits  head                   scales of a group            weight
//   Q4_0, Q5_0   4, 5       -                      f16 d[P]                     d (code - 8 or 16)
//   Q8_0         8          -                      f16 d[P]                     d (code - 128)
//   Q4_1, Q5_1   4, 5       -                      f16 d[P], f16 m[P]           d code + m
//   Q4_K, Q5_K   4, 5       f16 d[P], f16 min[P]   u8 s[P], u8 t[P]             d s code - min t
//   Q6_K         6          f16 d[P]               s8 s[P], s8 t[P]             d s (code - 32), d t (..) in the second half
//
// Codes of a group: eight quads of four inputs; in a slot of 4 P bytes, byte 4 j + i is input i of the quad in column j.
// Low nibbles of slot s hold quad 2 s, high nibbles quad 2 s + 1. A fifth bit is bit q of one further slot, for quad q; a
// fifth and sixth are bits 2 (q % 4) and 2 (q % 4) + 1 of further slot q / 4. Eight-bit codes take a slot a quad.
#pragma once

#include <cstddef>
#include <cstdint>

namespace outrider {

// The numbers that GGUF files use.
enum class GgmlType : int { kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14 };

struct BlockShape {
  std::size_t inputs;       // of a block
  std::size_t file_bytes;   // of a block of one column in the file
  std::size_t code_bits;
  std::size_t head_bytes;   // a column
  std::size_t scale_bytes;  // a column and group of 32

  std::size_t packed_bytes() const { return head_bytes + inputs / 32 * (scale_bytes + 4 * code_bits); }  // a column
};

// Throws std::invalid_argument for a type that has no kernel.
BlockShape block_shape(GgmlType type);

// Packed bytes of `panel` columns of k inputs.
std::size_t panel_bytes(std::size_t k, std::size_t panel, GgmlType type);

// Column j of the packed matrix is the row of k inputs at `rows[j]`, as a file has it; `packed` takes whole panels. Works on
// all threads.
void pack_quantised(const std::uint8_t* const* rows, std::uint8_t* packed, std::size_t n, std::size_t k, std::size_t panel,
                    GgmlType type);

}  // namespace outrider
