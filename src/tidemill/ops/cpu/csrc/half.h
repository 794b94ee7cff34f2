// 16-bit floats one at a time, for code that is compiled for every x86-64 CPU.
#pragma once

#include <cstdint>
#include <cstring>

namespace tidemill {

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float bf16_to_float(uint16_t half) { return float_of_bits(uint32_t{half} << 16); }

// Ties to even; NaN stays NaN.
inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = bits_of_float(value);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float f16_to_float(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16;
  const uint32_t magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) return float_of_bits(sign | 0x7f800000 | magnitude << 13);
  // Exponents differ by 112: shifting the bits and multiplying also gets denormals right.
  return float_of_bits(sign | bits_of_float(float_of_bits(magnitude << 13) * 0x1p112f));
}

// Ties to even; beyond 65504 it saturates: a scale that large has no use for infinity.
inline uint16_t float_to_f16(float value) {
  const uint16_t sign = bits_of_float(value) >> 16 & 0x8000;
  const float magnitude = float_of_bits(bits_of_float(value) & 0x7fffffff);
  if (magnitude >= 65504.0f) return sign | 0x7bff;
  if (magnitude < 0x1p-14f) {  // a denormal: adding 2^-1 leaves units of 2^-24
    return sign | static_cast<uint16_t>(bits_of_float(magnitude + 0.5f) - bits_of_float(0.5f));
  }
  const uint32_t bits = bits_of_float(magnitude) - (112u << 23);
  return sign | static_cast<uint16_t>((bits + 0xfff + ((bits >> 13) & 1)) >> 13);
}

}  // namespace tidemill
