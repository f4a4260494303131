#include <cstring>
#include <stdexcept>
#include <string>

#include "blocks.h"
#include "pool.h"

namespace outrider {
namespace {

void nibbles(const std::uint8_t* packed, std::uint8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = packed[i] & 15;
    codes[i + 16] = packed[i] >> 4;
  }
}

void fifth_bits(const std::uint8_t* bits, std::uint8_t* codes) {
  for (int i = 0; i < 32; ++i) codes[i] |= ((bits[i / 8] >> (i % 8)) & 1) << 4;
}

// Twelve bytes hold eight 6-bit scales and eight 6-bit minimums.
void k_scales(const std::uint8_t* packed, Block& block) {
  for (int g = 0; g < 4; ++g) {
    block.scales[g][0] = packed[g] & 63;
    block.scales[g][1] = packed[g + 4] & 63;
    block.scales[g + 4][0] = (packed[g + 8] & 15) | ((packed[g] >> 6) << 4);
    block.scales[g + 4][1] = (packed[g + 8] >> 4) | ((packed[g + 4] >> 6) << 4);
  }
}

void k_nibbles(const std::uint8_t* packed, Block& block) {
  for (int i = 0; i < 128; ++i) {
    const int first = i / 32 * 64 + i % 32;
    block.codes[first] = packed[i] & 15;
    block.codes[first + 32] = packed[i] >> 4;
  }
}

void q6_k(const std::uint8_t* raw, Block& block) {
  const std::uint8_t *low = raw, *high = raw + 128, *scales = raw + 192;
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 32; ++i) {
      const std::uint8_t a = low[half * 64 + i], b = low[half * 64 + i + 32], bits = high[half * 32 + i];
      std::uint8_t* codes = block.codes + half * 128 + i;
      codes[0] = (a & 15) | ((bits & 3) << 4);
      codes[32] = (b & 15) | (((bits >> 2) & 3) << 4);
      codes[64] = (a >> 4) | (((bits >> 4) & 3) << 4);
      codes[96] = (b >> 4) | ((bits >> 6) << 4);
    }
  }
  for (int g = 0; g < 8; ++g) std::memcpy(block.scales[g], scales + 2 * g, 2);
  std::memcpy(block.head, raw + 208, 2);
}

}  // namespace

void read_block(const std::uint8_t* raw, GgmlType type, Block& block) {
  switch (type) {
    case GgmlType::kQ4_0:
      std::memcpy(block.scales[0], raw, 2);
      return nibbles(raw + 2, block.codes);
    case GgmlType::kQ4_1:
      std::memcpy(block.scales[0], raw, 4);
      return nibbles(raw + 4, block.codes);
    case GgmlType::kQ5_0:
      std::memcpy(block.scales[0], raw, 2);
      nibbles(raw + 6, block.codes);
      return fifth_bits(raw + 2, block.codes);
    case GgmlType::kQ5_1:
      std::memcpy(block.scales[0], raw, 4);
      nibbles(raw + 8, block.codes);
      return fifth_bits(raw + 4, block.codes);
    case GgmlType::kQ8_0:
      std::memcpy(block.scales[0], raw, 2);
      for (int i = 0; i < 32; ++i) block.codes[i] = raw[2 + i] ^ 128;
      return;
    case GgmlType::kQ4_K:
      std::memcpy(block.head, raw, 4);
      k_scales(raw + 4, block);
      return k_nibbles(raw + 16, block);
    case GgmlType::kQ5_K:
      std::memcpy(block.head, raw, 4);
      k_scales(raw + 4, block);
      k_nibbles(raw + 48, block);
      for (int i = 0; i < 256; ++i) block.codes[i] |= ((raw[16 + i % 32] >> (i / 32)) & 1) << 4;
      return;
    case GgmlType::kQ6_K:
      return q6_k(raw, block);
  }
}

namespace {

std::uint32_t read_quad(const std::uint8_t* codes) {
  std::uint32_t quad;
  std::memcpy(&quad, codes, sizeof(quad));
  return quad;
}

// The codes of a group begin at `out`; this column's bytes of each vector are written.
void write_codes(const std::uint8_t* codes, std::uint8_t* out, std::size_t column, std::size_t panel, std::size_t bits) {
  const auto write = [&](std::size_t vector, std::uint32_t quad) {
    std::memcpy(out + vector * 4 * panel + 4 * column, &quad, sizeof(quad));
  };
  if (bits == 8) {
    for (std::size_t quad = 0; quad < 8; ++quad) write(quad, read_quad(codes + 4 * quad));
    return;
  }
  std::uint32_t fifth = 0, both[2] = {0, 0};
  for (std::size_t quad = 0; quad < 8; ++quad) {
    const std::uint32_t high = read_quad(codes + 4 * quad) >> 4;
    fifth |= (high & 0x01010101u) << quad;
    both[quad / 4] |= (high & 0x03030303u) << (quad % 4 * 2);
  }
  for (std::size_t vector = 0; vector < 4; ++vector) {
    const std::uint32_t low = read_quad(codes + 8 * vector), high = read_quad(codes + 8 * vector + 4);
    write(vector, (low & 0x0f0f0f0fu) | (high & 0x0f0f0f0fu) << 4);
  }
  if (bits == 5) write(4, fifth);
  if (bits == 6) write(4, both[0]);
  if (bits == 6) write(5, both[1]);
}

// Scales are stored field by field: all columns' first, then all columns' second.
void write_fields(const std::uint8_t* fields, std::size_t bytes, std::size_t field_bytes, std::uint8_t* out, std::size_t column,
                  std::size_t panel) {
  for (std::size_t at = 0; at < bytes; at += field_bytes)
    std::memcpy(out + at * panel + column * field_bytes, fields + at, field_bytes);
}

struct PackTasks {
  const std::uint8_t* raw;
  std::uint8_t* packed;
  std::size_t n, k, panel;
  GgmlType type;
  BlockShape shape;
};

void pack_panel(const void* tasks_pointer, std::size_t index) {
  const PackTasks& tasks = *static_cast<const PackTasks*>(tasks_pointer);
  const BlockShape& shape = tasks.shape;
  const std::size_t panel = tasks.panel, blocks = tasks.k / shape.inputs;
  const std::size_t block_bytes = shape.packed_bytes() * panel;
  const std::size_t group_bytes = (shape.scale_bytes + 4 * shape.code_bits) * panel;
  const std::size_t scale_field = shape.inputs == 32 ? 2 : 1;
  std::uint8_t* out = tasks.packed + index * blocks * block_bytes;
  if ((index + 1) * panel > tasks.n) std::memset(out, 0, blocks * block_bytes);  // columns past n weigh nothing
  for (std::size_t column = 0; column < panel && index * panel + column < tasks.n; ++column) {
    const std::uint8_t* raw = tasks.raw + (index * panel + column) * blocks * shape.file_bytes;
    for (std::size_t b = 0; b < blocks; ++b) {
      Block block;
      read_block(raw + b * shape.file_bytes, tasks.type, block);
      std::uint8_t* to = out + b * block_bytes;
      write_fields(block.head, shape.head_bytes, 2, to, column, panel);
      to += shape.head_bytes * panel;
      for (std::size_t g = 0; g < shape.inputs / 32; ++g, to += group_bytes) {
        write_fields(block.scales[g], shape.scale_bytes, scale_field, to, column, panel);
        write_codes(block.codes + 32 * g, to + shape.scale_bytes * panel, column, panel, shape.code_bits);
      }
    }
  }
}

}  // namespace

BlockShape block_shape(GgmlType type) {
  switch (type) {
    case GgmlType::kQ4_0: return {32, 18, 4, 0, 2};
    case GgmlType::kQ4_1: return {32, 20, 4, 0, 4};
    case GgmlType::kQ5_0: return {32, 22, 5, 0, 2};
    case GgmlType::kQ5_1: return {32, 24, 5, 0, 4};
    case GgmlType::kQ8_0: return {32, 34, 8, 0, 2};
    case GgmlType::kQ4_K: return {256, 144, 4, 4, 2};
    case GgmlType::kQ5_K: return {256, 176, 5, 4, 2};
    case GgmlType::kQ6_K: return {256, 210, 6, 2, 2};
  }
  throw std::invalid_argument("ggml type " + std::to_string(static_cast<int>(type)) + " has no kernel");
}

std::size_t panel_bytes(std::size_t k, std::size_t panel, GgmlType type) {
  const BlockShape shape = block_shape(type);
  return k / shape.inputs * shape.packed_bytes() * panel;
}

void pack_quantised(const std::uint8_t* raw, std::uint8_t* packed, std::size_t n, std::size_t k, std::size_t panel, GgmlType type) {
  const PackTasks tasks{raw, packed, n, k, panel, type, block_shape(type)};
  run_tasks((n + panel - 1) / panel, pack_panel, &tasks);
}

}  // namespace outrider
