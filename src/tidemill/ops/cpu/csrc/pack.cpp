#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.h"

namespace tidemill {
namespace {

// 32 columns of a row: value = scale * q + min.
struct Codes {
  uint8_t q[kBlockColumns];
  float scale, min;
};

float f16_at(const uint8_t* at) {
  uint16_t half;
  std::memcpy(&half, at, sizeof half);
  return f16_to_float(half);
}

// Low nibbles are columns 0 … 15, high ones columns 16 … 31.
void split_nibbles(const uint8_t* bytes, uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = bytes[i] & 15;
    q[16 + i] = bytes[i] >> 4;
  }
}

void add_fifth_bits(const uint8_t* bits, uint8_t* q) {
  for (int i = 0; i < 32; ++i) q[i] |= (bits[i / 8] >> (i % 8) & 1) << 4;
}

void q4_0(const uint8_t* block, Codes& to) {
  split_nibbles(block + 2, to.q);
  to.scale = f16_at(block);
  to.min = -8.0f * to.scale;
}

void q4_1(const uint8_t* block, Codes& to) {
  split_nibbles(block + 4, to.q);
  to.scale = f16_at(block);
  to.min = f16_at(block + 2);
}

void q5_0(const uint8_t* block, Codes& to) {
  split_nibbles(block + 6, to.q);
  add_fifth_bits(block + 2, to.q);
  to.scale = f16_at(block);
  to.min = -16.0f * to.scale;
}

void q5_1(const uint8_t* block, Codes& to) {
  split_nibbles(block + 8, to.q);
  add_fifth_bits(block + 4, to.q);
  to.scale = f16_at(block);
  to.min = f16_at(block + 2);
}

void q8_0(const uint8_t* block, Codes& to) {
  for (int i = 0; i < 32; ++i) to.q[i] = block[2 + i] ^ 0x80;  // + 128
  to.scale = f16_at(block);
  to.min = -128.0f * to.scale;
}

// Super-blocks of 256: f16 scale and minimum, and eight of each in 6 bits for the blocks of 32.
void k_scales(const uint8_t* super, int block, Codes& to) {
  const uint8_t* s = super + 4;
  int scale, min;
  if (block < 4) {
    scale = s[block] & 63;
    min = s[block + 4] & 63;
  } else {
    scale = (s[block + 4] & 15) | (s[block - 4] >> 6) << 4;
    min = s[block + 4] >> 4 | (s[block] >> 6) << 4;
  }
  to.scale = f16_at(super) * static_cast<float>(scale);
  to.min = -f16_at(super + 2) * static_cast<float>(min);
}

void k_nibbles(const uint8_t* nibbles, int block, uint8_t* q) {
  const uint8_t* bytes = nibbles + block / 2 * 32;
  for (int i = 0; i < 32; ++i) q[i] = bytes[i] >> (block % 2 * 4) & 15;
}

void q4_k(const uint8_t* super, int block, Codes& to) {
  k_scales(super, block, to);
  k_nibbles(super + 16, block, to.q);
}

void q5_k(const uint8_t* super, int block, Codes& to) {
  k_scales(super, block, to);
  k_nibbles(super + 48, block, to.q);
  for (int i = 0; i < 32; ++i) to.q[i] |= (super[16 + i] >> block & 1) << 4;
}

// 6-bit codes with a signed scale for every 16: requantized with one scale for the 32.
void q6_k(const uint8_t* super, int block, Codes& to) {
  const uint8_t* low = super + block / 4 * 64 + block % 2 * 32;
  const uint8_t* high = super + 128 + block / 4 * 32;
  const auto* scales = reinterpret_cast<const int8_t*>(super + 192) + 2 * block;
  const float scale = f16_at(super + 208);
  float values[32];
  for (int i = 0; i < 32; ++i) {
    const int q = (low[i] >> (block % 4 / 2 * 4) & 15) | (high[i] >> (block % 4 * 2) & 3) << 4;
    values[i] = scale * static_cast<float>(scales[i / 16] * (q - 32));
  }
  const auto [least, most] = std::minmax_element(values, values + 32);
  to.scale = f16_to_float(float_to_f16((*most - *least) / 255.0f));
  to.min = f16_to_float(float_to_f16(*least));
  const float inverse = to.scale > 0.0f ? 1.0f / to.scale : 0.0f;
  for (int i = 0; i < 32; ++i) {
    to.q[i] = static_cast<uint8_t>(
        std::clamp(std::lround((values[i] - to.min) * inverse), 0l, 255l));
  }
}

void codes_of(FileFormat format, const uint8_t* row, int64_t block, Codes& to) {
  const uint8_t* super = row + block / 8 * row_bytes(format, 256);
  const int within = static_cast<int>(block % 8);
  switch (format) {
    case FileFormat::q4_0: return q4_0(row + block * 18, to);
    case FileFormat::q4_1: return q4_1(row + block * 20, to);
    case FileFormat::q5_0: return q5_0(row + block * 22, to);
    case FileFormat::q5_1: return q5_1(row + block * 24, to);
    case FileFormat::q8_0: return q8_0(row + block * 34, to);
    case FileFormat::q4_k: return q4_k(super, within, to);
    case FileFormat::q5_k: return q5_k(super, within, to);
    case FileFormat::q6_k: return q6_k(super, within, to);
    default: return;  // floats have no codes
  }
}

bool is_float(FileFormat format) {
  return format == FileFormat::f32 || format == FileFormat::f16 || format == FileFormat::bf16;
}

float float_at(FileFormat format, const uint8_t* row, int64_t column) {
  if (format == FileFormat::f32) {
    float value;
    std::memcpy(&value, row + 4 * column, sizeof value);
    return value;
  }
  if (format == FileFormat::f16) return f16_at(row + 2 * column);
  uint16_t half;
  std::memcpy(&half, row + 2 * column, sizeof half);
  return bf16_to_float(half);
}

// One row's 32 columns go to every 64th bytes of the panel's block.
void put_codes(const Codes& codes, Format format, int lane, uint8_t* block) {
  const uint16_t halves[2] = {float_to_f16(codes.scale), float_to_f16(codes.min)};
  std::memcpy(block + 2 * lane, &halves[0], 2);
  std::memcpy(block + 32 + 2 * lane, &halves[1], 2);
  uint8_t* q = block + 64 + 4 * lane;
  if (format == Format::u8) {
    for (int v = 0; v < 8; ++v) std::memcpy(q + 64 * v, codes.q + 4 * v, 4);
    return;
  }
  for (int v = 0; v < 4; ++v) {
    for (int b = 0; b < 4; ++b) {
      q[64 * v + b] = static_cast<uint8_t>(codes.q[8 * v + b] | codes.q[8 * v + 4 + b] << 4);
    }
  }
}

void put_floats(const float* values, int lane, uint8_t* block) {
  for (int i = 0; i < kBlockColumns; ++i) {
    const uint16_t half = float_to_bf16(values[i]);
    std::memcpy(block + 64 * (i / 2) + 4 * lane + 2 * (i % 2), &half, 2);
  }
}

}  // namespace

Format packed_format(FileFormat format) {
  switch (format) {
    case FileFormat::q4_0:
    case FileFormat::q4_1:
    case FileFormat::q4_k: return Format::u4;
    case FileFormat::q5_0:
    case FileFormat::q5_1:
    case FileFormat::q5_k:
    case FileFormat::q6_k:
    case FileFormat::q8_0: return Format::u8;
    default: return Format::bf16;
  }
}

int64_t row_bytes(FileFormat format, int64_t columns) {
  switch (format) {
    case FileFormat::f32: return columns * 4;
    case FileFormat::f16:
    case FileFormat::bf16: return columns * 2;
    case FileFormat::q4_0: return columns / 32 * 18;
    case FileFormat::q4_1: return columns / 32 * 20;
    case FileFormat::q5_0: return columns / 32 * 22;
    case FileFormat::q5_1: return columns / 32 * 24;
    case FileFormat::q8_0: return columns / 32 * 34;
    case FileFormat::q4_k: return columns / 256 * 144;
    case FileFormat::q5_k: return columns / 256 * 176;
    case FileFormat::q6_k: return columns / 256 * 210;
  }
  return 0;
}

void pack_rows(FileFormat format, const uint8_t* data, int64_t features, int64_t from, int64_t end,
               int64_t first, const PackedWeight& to) {
  const int64_t stride = row_bytes(format, features);
  const int64_t blocks = to.columns / kBlockColumns;
  const int64_t size = block_bytes(to.format);
  for (int64_t row = from; row < end; ++row) {
    const uint8_t* source = data + row * stride;
    const int64_t panel = (first + row) / kPanelRows;
    const int lane = static_cast<int>((first + row) % kPanelRows);
    uint8_t* block = const_cast<uint8_t*>(to.data) + panel * blocks * size;
    for (int64_t b = 0; b < blocks; ++b, block += size) {
      Codes codes;
      float values[kBlockColumns] = {};
      if (is_float(format)) {
        const int64_t count = std::min<int64_t>(kBlockColumns, features - b * kBlockColumns);
        for (int i = 0; i < count; ++i) values[i] = float_at(format, source, b * kBlockColumns + i);
        put_floats(values, lane, block);
        continue;
      }
      codes_of(format, source, b, codes);
      if (to.format != Format::bf16) {
        put_codes(codes, to.format, lane, block);
        continue;
      }
      for (int i = 0; i < kBlockColumns; ++i) {
        values[i] = codes.scale * static_cast<float>(codes.q[i]) + codes.min;
      }
      put_floats(values, lane, block);
    }
  }
}

}  // namespace tidemill
