#include <cstring>
#include <stdexcept>
#include <string>

#include "blocks.h"
#include "pool.h"

namespace outrider {
namespace {

constexpr std::uint32_t kNibbles = 0x0f0f0f0f, kBits = 0x01010101;

// Four inputs of one column, a byte each.
std::uint32_t read_quad(const std::uint8_t* at) {
  std::uint32_t quad;
  std::memcpy(&quad, at, sizeof(quad));
  return quad;
}

// One column's place in a group: its four bytes of slot s are `s` slots after `at`.
struct Column {
  std::uint8_t* at;
  std::size_t slot_bytes;

  void put(std::size_t slot, std::uint32_t quad) const { std::memcpy(at + slot * slot_bytes, &quad, sizeof(quad)); }
  Column after(std::size_t slots) const { return {at + slots * slot_bytes, slot_bytes}; }
};

// `packed` holds the codes of one run of inputs in its low nibbles and of another in its high ones, 8 to a slot.
void put_nibbles(const std::uint8_t* packed, std::size_t slots, Column low, Column high) {
  for (std::size_t s = 0; s < slots; ++s) {
    const std::uint32_t first = read_quad(packed + 8 * s), second = read_quad(packed + 8 * s + 4);
    low.put(s, (first & kNibbles) | (second & kNibbles) << 4);
    high.put(s, (first >> 4 & kNibbles) | (second & ~kNibbles));
  }
}

// Bit j of `bits` belongs to input j; the product moves bit i of four to byte i.
std::uint32_t fifth_slot(std::uint32_t bits) {
  std::uint32_t fifth = 0;
  for (int quad = 0; quad < 8; ++quad) fifth |= ((bits >> (4 * quad) & 15) * 0x00204081 & kBits) << quad;
  return fifth;
}

// Where one column of a block goes. Scales are stored field by field: all columns' first, then all columns' second.
struct Place {
  std::uint8_t* block;
  std::size_t column, panel;
  BlockShape shape;

  std::size_t group_bytes() const { return (shape.scale_bytes + 4 * shape.code_bits) * panel; }
  std::uint8_t* group(std::size_t g) const { return block + shape.head_bytes * panel + g * group_bytes(); }
  Column codes(std::size_t g) const { return {group(g) + shape.scale_bytes * panel + 4 * column, 4 * panel}; }

  void put_halves(const std::uint8_t* fields, std::size_t bytes) const {
    for (std::size_t at = 0; at < bytes; at += 2) std::memcpy(block + at * panel + 2 * column, fields + at, 2);
  }
  void put_scales(std::size_t g, std::uint8_t first, std::uint8_t second) const {
    group(g)[column] = first;
    group(g)[panel + column] = second;
  }
};

// Q4_0, Q4_1, Q5_0 and Q5_1: f16 fields, then 32 fifth bits where there are any, then 16 bytes of nibbles.
void pack_simple(const std::uint8_t* raw, const Place place) {
  const std::size_t fields = place.shape.scale_bytes;
  const bool fifth = place.shape.code_bits == 5;
  const Column codes = place.codes(0);
  place.put_halves(raw, fields);
  put_nibbles(raw + fields + (fifth ? 4 : 0), 2, codes, codes.after(2));
  if (fifth) codes.put(4, fifth_slot(read_quad(raw + fields)));
}

void pack_q8_0(const std::uint8_t* raw, const Place place) {
  const Column codes = place.codes(0);
  place.put_halves(raw, 2);
  for (std::size_t quad = 0; quad < 8; ++quad) codes.put(quad, read_quad(raw + 2 + 4 * quad) ^ 0x80808080u);
}

void pack_q4_k(const std::uint8_t* raw, const Place place) {
  const bool has_fifth = place.shape.code_bits == 5;
  std::uint8_t scales[8][4];
  k_scales(raw + 4, scales);
  place.put_halves(raw, 4);
  for (std::size_t g = 0; g < 8; ++g) place.put_scales(g, scales[g][0], scales[g][1]);
  const std::uint8_t* nibbles = raw + (has_fifth ? 48 : 16);
  for (std::size_t g = 0; g < 8; g += 2) put_nibbles(nibbles + 16 * g, 4, place.codes(g), place.codes(g + 1));
  for (std::size_t g = 0; has_fifth && g < 8; ++g) {
    std::uint32_t fifth = 0;
    for (std::size_t quad = 0; quad < 8; ++quad) fifth |= (read_quad(raw + 16 + 4 * quad) >> g & kBits) << quad;
    place.codes(g).put(4, fifth);
  }
}

// In each byte: four fields of two bits of four quads become four quads of those fields.
void transpose_pairs(const std::uint8_t* high, std::uint32_t (&fields)[4]) {
  constexpr std::uint32_t kEven = 0x33333333;
  const std::uint32_t a = read_quad(high), b = read_quad(high + 4), c = read_quad(high + 8), d = read_quad(high + 12);
  const std::uint32_t even_ab = (a & kEven) | (b & kEven) << 2, odd_ab = (a >> 2 & kEven) | (b & ~kEven);
  const std::uint32_t even_cd = (c & kEven) | (d & kEven) << 2, odd_cd = (c >> 2 & kEven) | (d & ~kEven);
  fields[0] = (even_ab & kNibbles) | (even_cd & kNibbles) << 4;
  fields[1] = (odd_ab & kNibbles) | (odd_cd & kNibbles) << 4;
  fields[2] = (even_ab >> 4 & kNibbles) | (even_cd & ~kNibbles);
  fields[3] = (odd_ab >> 4 & kNibbles) | (odd_cd & ~kNibbles);
}

void pack_q6_k(const std::uint8_t* raw, const Place place) {
  const std::uint8_t *low = raw, *high = raw + 128, *scales = raw + 192;
  place.put_halves(raw + 208, 2);
  for (std::size_t g = 0; g < 8; ++g) place.put_scales(g, scales[2 * g], scales[2 * g + 1]);
  for (std::size_t g = 0; g < 8; g += 4, low += 64, high += 32) {
    put_nibbles(low, 4, place.codes(g), place.codes(g + 2));
    put_nibbles(low + 32, 4, place.codes(g + 1), place.codes(g + 3));
    for (std::size_t slot = 0; slot < 2; ++slot) {
      std::uint32_t fields[4];
      transpose_pairs(high + 16 * slot, fields);
      for (std::size_t part = 0; part < 4; ++part) place.codes(g + part).put(4 + slot, fields[part]);
    }
  }
}

struct PackTasks {
  const std::uint8_t* const* rows;
  std::uint8_t* packed;
  std::size_t n, k, panel;
  BlockShape shape;
};

template <void (*Pack)(const std::uint8_t* raw, Place place)>
void pack_panel(const void* tasks_pointer, std::size_t index) {
  const PackTasks& tasks = *static_cast<const PackTasks*>(tasks_pointer);
  const BlockShape shape = tasks.shape;
  const std::size_t blocks = tasks.k / shape.inputs, block_bytes = shape.packed_bytes() * tasks.panel;
  const std::size_t first = index * tasks.panel;
  const std::size_t columns = tasks.n - first < tasks.panel ? tasks.n - first : tasks.panel;
  std::uint8_t* out = tasks.packed + index * blocks * block_bytes;
  if (columns < tasks.panel) std::memset(out, 0, blocks * block_bytes);  // columns past n weigh nothing
  for (std::size_t b = 0; b < blocks; ++b) {
    for (std::size_t column = 0; column < columns; ++column) {
      Pack(tasks.rows[first + column] + b * shape.file_bytes, {out + b * block_bytes, column, tasks.panel, shape});
    }
  }
}

Task packer_of(GgmlType type) {
  switch (type) {
    case GgmlType::kQ8_0: return pack_panel<pack_q8_0>;
    case GgmlType::kQ4_K:
    case GgmlType::kQ5_K: return pack_panel<pack_q4_k>;
    case GgmlType::kQ6_K: return pack_panel<pack_q6_k>;
    default: return pack_panel<pack_simple>;
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

void pack_quantised(const std::uint8_t* const* rows, std::uint8_t* packed, std::size_t n, std::size_t k, std::size_t panel,
                    GgmlType type) {
  const PackTasks tasks{rows, packed, n, k, panel, block_shape(type)};
  run_tasks((n + panel - 1) / panel, packer_of(type), &tasks);
}

}  // namespace outrider
