// As many floats at a time as a register holds, in the compiler's own vector types. Wider ones would be legal, but
// compilers keep those in memory: matrix products then run ten times slower.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>
#include <utility>

namespace sgl_kernel_ext {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif

using Vec = float __attribute__((vector_size(4 * kLanes)));
using IntVec = int32_t __attribute__((vector_size(4 * kLanes)));
using HalfWords = uint16_t __attribute__((vector_size(2 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));

template <size_t... Lane>
inline Vec splat_lanes(float value, std::index_sequence<Lane...>) {
  return Vec{((void)Lane, value)...};
}

// A plain broadcast; 0 + value would cost an addition to keep the sign of zeros.
inline Vec splat(float value) {
  return splat_lanes(value, std::make_index_sequence<kLanes>{});
}

inline Vec load(const float* from) {
  Vec out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}

inline void store(float* to, Vec value) {
  std::memcpy(to, &value, sizeof(value));
}

// Rounds to the nearest, ties to even, as torch does.
inline void store(at::BFloat16* to, Vec value) {
  const Words bits = reinterpret_cast<Words>(value);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words nan = reinterpret_cast<Words>(value != value);
  const HalfWords words = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), HalfWords);
  std::memcpy(to, &words, sizeof(words));
}

inline void store(at::Half* to, Vec value) {
  for (int64_t i = 0; i < kLanes; ++i) to[i] = static_cast<at::Half>(value[i]);
}

inline Vec load(const at::BFloat16* from) {
  HalfWords words;
  std::memcpy(&words, from, sizeof(words));
  const Words wide = __builtin_convertvector(words, Words) << 16;
  Vec out;
  std::memcpy(&out, &wide, sizeof(out));
  return out;
}

inline Vec load(const at::Half* from) {
  Vec out;
  for (int64_t i = 0; i < kLanes; ++i) out[i] = static_cast<float>(from[i]);
  return out;
}

inline Vec select(IntVec condition, Vec yes, Vec no) {
  return reinterpret_cast<Vec>((condition & reinterpret_cast<IntVec>(yes)) |
                               (~condition & reinterpret_cast<IntVec>(no)));
}

inline Vec vec_max(Vec a, Vec b) {
  return select(a > b, a, b);
}

inline Vec vec_min(Vec a, Vec b) {
  return select(a < b, a, b);
}

// e^x for what range reduction leaves, |x| up to half of log 2: Taylor's polynomial of degree 7.
inline Vec exp_polynomial(Vec rest) {
  Vec sum = splat(1.0f / 5040) * rest + 1.0f / 720;
  sum = sum * rest + 1.0f / 120;
  sum = sum * rest + 1.0f / 24;
  sum = sum * rest + 1.0f / 6;
  sum = sum * rest + 0.5f;
  sum = sum * rest + 1.0f;
  sum = sum * rest + 1.0f;
  return sum;
}

// e^x to about two units in the last place; exactly 0 below -87, so that hidden keys weigh nothing.
inline Vec vec_exp(Vec x) {
  const Vec lowest = splat(-87.0f);
  const Vec clamped = vec_min(vec_max(x, lowest), splat(88.0f));
  const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec power = (clamped * 1.44269504f + shift) - shift;
  const Vec rest = clamped - power * 0.693145752f - power * 1.42860677e-6f;
  const Vec sum = exp_polynomial(rest);
  const IntVec exponent = (__builtin_convertvector(power, IntVec) + 127) << 23;
  return select(x > lowest, sum * reinterpret_cast<Vec>(exponent), Vec{});
}

// Call fn with a value of the C++ type behind `type`.
template <typename Fn>
void with_type(at::ScalarType type, Fn&& fn) {
  if (type == at::kFloat) return fn(float{});
  if (type == at::kBFloat16) return fn(at::BFloat16{});
  if (type == at::kHalf) return fn(at::Half{});
  TORCH_CHECK_TYPE(false, "float32, bfloat16 or float16 expected, got ", type);
}

}  // namespace sgl_kernel_ext
