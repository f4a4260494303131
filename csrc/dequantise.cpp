#include <cstring>
#include <stdexcept>

#include "narrow.h"
#include "blocks.h"
#include "pool.h"

namespace outrider {
namespace {

// Blocks of one task: enough work to be worth handing out, little enough to balance.
constexpr std::size_t kTaskValues = std::size_t{1} << 15;

// One block's numbers: codes as bytes (signed ones shifted to unsigned), head and scales as they are packed.
struct Block {
  std::uint8_t codes[256];
  std::uint8_t head[4];
  std::uint8_t scales[8][4];
};

void nibbles(const std::uint8_t* packed, std::uint8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = packed[i] & 15;
    codes[i + 16] = packed[i] >> 4;
  }
}

void fifth_bits(const std::uint8_t* bits, std::uint8_t* codes) {
  for (int i = 0; i < 32; ++i) codes[i] |= ((bits[i / 8] >> (i % 8)) & 1) << 4;
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
      k_scales(raw + 4, block.scales);
      return k_nibbles(raw + 16, block);
    case GgmlType::kQ5_K:
      std::memcpy(block.head, raw, 4);
      k_scales(raw + 4, block.scales);
      k_nibbles(raw + 48, block);
      for (int i = 0; i < 256; ++i) block.codes[i] |= ((raw[16 + i % 32] >> (i / 32)) & 1) << 4;
      return;
    case GgmlType::kQ6_K:
      return q6_k(raw, block);
  }
}

float half_to_float(const std::uint8_t* at) {
  std::uint16_t bits;
  std::memcpy(&bits, at, sizeof(bits));
  const std::uint32_t sign = std::uint32_t(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent == 0) {  // zero and subnormals: fraction * 2^-24
    const float value = float(fraction) * 0x1p-24f;
    return sign ? -value : value;
  }
  const std::uint32_t wide = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// In the reference's order of operations, so that float32 results agree bit for bit.
void scale_and_offset(const std::uint8_t* codes, std::size_t count, float scale, float offset, float* out) {
  for (std::size_t i = 0; i < count; ++i) out[i] = float(codes[i]) * scale + offset;
}

void centre_and_scale(const std::uint8_t* codes, std::size_t count, int centre, float scale, float* out) {
  for (std::size_t i = 0; i < count; ++i) out[i] = float(int(codes[i]) - centre) * scale;
}

void block_values(const Block& block, GgmlType type, float* out) {
  const float d = half_to_float(type >= GgmlType::kQ4_K ? block.head : block.scales[0]);
  switch (type) {
    case GgmlType::kQ4_0: return centre_and_scale(block.codes, 32, 8, d, out);
    case GgmlType::kQ5_0: return centre_and_scale(block.codes, 32, 16, d, out);
    case GgmlType::kQ8_0: return centre_and_scale(block.codes, 32, 128, d, out);
    case GgmlType::kQ4_1:
    case GgmlType::kQ5_1: return scale_and_offset(block.codes, 32, d, half_to_float(block.scales[0] + 2), out);
    case GgmlType::kQ4_K:
    case GgmlType::kQ5_K: {
      const float least = half_to_float(block.head + 2);
      for (std::size_t g = 0; g < 8; ++g) {
        const float scale = d * float(block.scales[g][0]), offset = -(least * float(block.scales[g][1]));
        scale_and_offset(block.codes + 32 * g, 32, scale, offset, out + 32 * g);
      }
      return;
    }
    case GgmlType::kQ6_K:
      for (std::size_t g = 0; g < 16; ++g) {
        const float scale = d * float(static_cast<std::int8_t>(block.scales[g / 2][g % 2]));
        centre_and_scale(block.codes + 16 * g, 16, 32, scale, out + 16 * g);
      }
      return;
  }
}

struct DequantiseTasks {
  const std::uint8_t* raw;
  void* out;
  std::size_t blocks, blocks_a_task;
  GgmlType type;
  BlockShape shape;
  Dtype dtype;
};

void dequantise_blocks(const void* tasks_pointer, std::size_t index) {
  const DequantiseTasks& tasks = *static_cast<const DequantiseTasks*>(tasks_pointer);
  const std::size_t inputs = tasks.shape.inputs, first = index * tasks.blocks_a_task;
  const std::size_t last = first + tasks.blocks_a_task < tasks.blocks ? first + tasks.blocks_a_task : tasks.blocks;
  for (std::size_t b = first; b < last; ++b) {
    Block block;
    read_block(tasks.raw + b * tasks.shape.file_bytes, tasks.type, block);
    if (tasks.dtype == Dtype::kF32) {
      block_values(block, tasks.type, static_cast<float*>(tasks.out) + b * inputs);
    } else {
      float values[256];
      block_values(block, tasks.type, values);
      std::uint16_t* out = static_cast<std::uint16_t*>(tasks.out) + b * inputs;
      for (std::size_t i = 0; i < inputs; ++i) out[i] = to_bf16(values[i]);
    }
  }
}

}  // namespace

void dequantise(const std::uint8_t* raw, void* out, std::size_t values, GgmlType type, Dtype dtype) {
  const BlockShape shape = block_shape(type);
  const std::size_t blocks = values / shape.inputs, blocks_a_task = kTaskValues / shape.inputs;
  const DequantiseTasks tasks{raw, out, blocks, blocks_a_task, type, shape, dtype};
  run_tasks((blocks + blocks_a_task - 1) / blocks_a_task, dequantise_blocks, &tasks);
}

}  // namespace outrider
