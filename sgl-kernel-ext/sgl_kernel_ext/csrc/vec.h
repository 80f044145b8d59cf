// Sums and exponentials of kLanes floats at a time, for the kernels that order candidates.
#pragma once

#include "simd.h"

namespace sgl_kernel_ext {

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
  x = select(low, lowest, x);
  const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
  const Vec shifted = x * 1.44269504f + shift;
  const Vec power = shifted - shift;
  const Vec rest = x - power * 0.693145752f - power * 1.42860677e-6f;
  const Vec sum = exp_polynomial(rest);
  return sum * reinterpret_cast<Vec>((reinterpret_cast<IntVec>(shifted) + 127) << 23);
}

}  // namespace sgl_kernel_ext
