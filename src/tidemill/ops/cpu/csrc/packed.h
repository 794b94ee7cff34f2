// Packed weights: one copy in memory, laid out for the dot products of few rows and unpacked on
// the fly for many.
//
// A panel is 16 output rows. Along k it is cut into blocks of 32 columns, each of which holds
//   u4, u8: fp16 scale[16], fp16 min[16], then the integers; value = scale * q + min
//     u4: 4 vectors of 64 bytes. Vector v, byte 4r + b: row r, column 8v + b in the low nibble and
//         column 8v + 4 + b in the high one.
//     u8: 8 vectors of 64 bytes. Vector v, byte 4r + b: row r, column 4v + b.
//   bf16: [16 pairs of columns][16 rows][2]
// so that a 32-bit lane belongs to one row, as vpdpbusd, vdpbf16ps and AMX take it. Rows beyond
// the weight's last are zero.
#pragma once

#include <cstdint>

namespace tidemill {

enum class Format { u4, u8, bf16 };

constexpr int kPanelRows = 16;
constexpr int kBlockColumns = 32;

constexpr int64_t block_bytes(Format format) {
  switch (format) {
    case Format::u4: return 64 + 4 * 64;
    case Format::u8: return 64 + 8 * 64;
    case Format::bf16: return 16 * 64;
  }
  return 0;
}

struct PackedWeight {
  Format format;
  int64_t rows;     // outputs
  int64_t columns;  // k, a multiple of 32
  const uint8_t* data;  // aligned to 64
};

}  // namespace tidemill
