// Sixteen floats at a time, by the compiler's vector extension.
#pragma once

#include <cstdint>
#include <cstring>

constexpr int64_t kLanes = 16;

using Vec = float __attribute__((vector_size(64)));
using IntVec = int32_t __attribute__((vector_size(64)));

inline Vec splat(float v) {
  return Vec{v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v};
}

inline Vec load(const float* from) {
  Vec out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}

inline float sum_of(Vec v) {
  float total = 0;
  for (int64_t i = 0; i < kLanes; ++i) total += v[i];
  return total;
}

// e^x for x <= 0 to about two units in the last place, NaN for NaN. Below -87 it stays at e^-87: beside the largest
// entry, which contributes e^0, that is nothing.
inline Vec exp_of_negative(Vec x) {
  const Vec lowest = splat(-87.0f);
  const IntVec low = x < lowest;  // false for NaN, which therefore survives
  x = reinterpret_cast<Vec>((low & reinterpret_cast<IntVec>(lowest)) | (~low & reinterpret_cast<IntVec>(x)));
  const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
  const Vec shifted = x * 1.44269504f + shift;
  const Vec power = shifted - shift;
  const Vec rest = x - power * 0.693145752f - power * 1.42860677e-6f;
  Vec sum = splat(1.0f / 5040) * rest + 1.0f / 720;
  sum = sum * rest + 1.0f / 120;
  sum = sum * rest + 1.0f / 24;
  sum = sum * rest + 1.0f / 6;
  sum = sum * rest + 0.5f;
  sum = sum * rest + 1.0f;
  sum = sum * rest + 1.0f;
  return sum * reinterpret_cast<Vec>((reinterpret_cast<IntVec>(shifted) + 127) << 23);
}
