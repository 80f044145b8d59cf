// y = x W^T + b for few to many rows on CPU, with W stored in the order in which it is read. The specification is
// reference/linear.py.
//
// W is cut into panels of 64 output columns; a panel holds, for one input value (float32) or two (bfloat16) after the
// other, the weights of its 64 columns. A panel stays in the L2 cache while all rows pass over it, so W is read from
// memory once per block of rows. Each output is summed in float32 over groups of 128 inputs in their order, then over
// the groups: it does not depend on how many rows there are.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>

#include "simd.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

using namespace sgl_kernel_ext;

constexpr int64_t kPanel = 64;       // output columns of a panel
constexpr int64_t kRowBlock = 48;    // rows that pass over a panel while their inputs stay in the L2 cache
constexpr int64_t kGroup = 128;      // inputs summed by themselves: one long sum would lose precision
constexpr int64_t kGrain = 1 << 15;  // multiplications that a thread should have at least

constexpr int kTileRows = 6;

// Vectors of outputs that a tile of so many rows is wide: its sums, the weights and an input have to fit into the
// registers, and there must be enough sums that none waits for the one before it.
constexpr int tile_vecs(int rows) {
#if defined(__AVX512F__)
  return 4;
#else
  return rows == 1 ? 8 : rows == 2 ? 4 : 2;
#endif
}

// Inputs that lie together in the packed weights, per type; and how many of them one instruction adds up.
template <typename T>
constexpr int64_t kPack = std::is_same_v<T, at::BFloat16> ? 2 : 1;
#if defined(__AVX512BF16__)
template <typename T>
constexpr int64_t kStep = kPack<T>;
#else
template <typename T>
constexpr int64_t kStep = 1;
#endif

// What the rows are multiplied as: without an instruction for pairs of bfloat16 both sides are widened.
template <typename T>
using Input = std::conditional_t<kStep<T> == kPack<T>, T, float>;

inline void accumulate(Vec& sum, const float* x, const Vec& weights) {
  sum += splat(*x) * weights;
}

// Weights of kLanes outputs for the input `at` of a pack, or for all of its inputs.
template <int At>
inline Vec load_weights(const float* from) {
  return load(from);
}

#if defined(__AVX512BF16__)
using Pairs = __m512bh;

template <int At>
inline Pairs load_weights(const at::BFloat16* from) {
  Pairs out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}

inline void accumulate(Vec& sum, const at::BFloat16* x, const Pairs& weights) {
  int32_t pair;
  std::memcpy(&pair, x, sizeof(pair));
  sum = reinterpret_cast<Vec>(
      _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), weights, reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair))));
}
#else
template <int At>
inline Vec load_weights(const at::BFloat16* from) {
  Words pairs;
  std::memcpy(&pairs, from, sizeof(pairs));
  return reinterpret_cast<Vec>(At == 0 ? pairs << 16 : pairs & 0xffff0000u);
}
#endif

struct Product {
  int64_t inputs, outputs, x_stride, out_stride;
};

// One input, or as many as one instruction takes, of all rows times the weights of all outputs of a tile.
template <int At, int Rows, int Vecs, typename T>
inline void step(const Product& product, const Input<T>* x, const T* panel, Vec (&part)[Rows][Vecs]) {
  using Weights = decltype(load_weights<At>(panel));
  Weights weights[Vecs];
  for (int v = 0; v < Vecs; ++v) weights[v] = load_weights<At>(panel + v * kLanes * kPack<T>);
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vecs; ++v) accumulate(part[r][v], x + r * product.x_stride + At, weights[v]);
}

// Rows x (Vecs * kLanes) outputs of one panel. `inputs` is a multiple of kPack.
template <int Rows, int Vecs, typename T>
inline void tile(const Product& product, const Input<T>* x, const T* panel, const float* bias, int64_t columns,
                 T* out) {
  Vec sum[Rows][Vecs] = {};
  for (int64_t group = 0; group < product.inputs; group += kGroup) {
    const int64_t end = std::min(product.inputs, group + kGroup);
    Vec part[Rows][Vecs] = {};
    for (int64_t k = group; k < end; k += kPack<T>, panel += kPanel * kPack<T>) {
      step<0, Rows, Vecs, T>(product, x + k, panel, part);
      if constexpr (kStep<T> < kPack<T>) step<1, Rows, Vecs, T>(product, x + k, panel, part);
    }
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < Vecs; ++v) sum[r][v] += part[r][v];
  }
  for (int v = 0; v < Vecs; ++v) {
    const int64_t left = columns - v * kLanes;
    if (left <= 0) break;
    const Vec shift = bias == nullptr ? Vec{} : load(bias + v * kLanes);
    for (int r = 0; r < Rows; ++r) {
      T* to = out + r * product.out_stride + v * kLanes;
      if (left >= kLanes) {
        store(to, sum[r][v] + shift);
      } else {
        T padded[kLanes];
        store(padded, sum[r][v] + shift);
        std::copy_n(padded, left, to);
      }
    }
  }
}

// So many rows over all outputs of one panel.
template <int Rows, typename T>
inline void some_rows(int64_t rows, const Product& product, const Input<T>* x, const T* panel, const float* bias,
                      int64_t columns, T* out) {
  if (rows == Rows) {
    constexpr int vecs = tile_vecs(Rows);
    for (int64_t at = 0; at < std::min(columns, kPanel); at += vecs * kLanes)
      tile<Rows, vecs, T>(product, x, panel + at * kPack<T>, bias == nullptr ? nullptr : bias + at, columns - at,
                          out + at);
  } else if constexpr (Rows > 1) {
    some_rows<Rows - 1, T>(rows, product, x, panel, bias, columns, out);
  }
}

// All rows over one panel, in tiles of nearly equal height: a tile of one row would read the panel for little work.
template <typename T>
void pass(const Product& product, int64_t rows, const Input<T>* x, const T* panel, const float* bias, int64_t columns,
          T* out) {
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t begin = rows * i / tiles, count = rows * (i + 1) / tiles - begin;
    some_rows<kTileRows, T>(count, product, x + begin * product.x_stride, panel, bias, columns,
                            out + begin * product.out_stride);
  }
}

int64_t padded_inputs(int64_t inputs, at::ScalarType type) {
  return type == at::kBFloat16 ? (inputs + 1) / 2 * 2 : inputs;
}

bool can_pack(at::ScalarType type) {
  return type == at::kFloat || type == at::kBFloat16;
}

at::Tensor pack_weight(const at::Tensor& weight_in) {
  TORCH_CHECK_VALUE(weight_in.dim() == 2, "pack_weight: weight must be [N, K]");
  TORCH_CHECK_TYPE(can_pack(weight_in.scalar_type()), "pack_weight: no products of ",
                   weight_in.scalar_type());
  const at::Tensor weight = weight_in.contiguous();
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  const int64_t panels = (outputs + kPanel - 1) / kPanel, padded = padded_inputs(inputs, weight.scalar_type());
  at::Tensor packed = at::zeros({panels, padded * kPanel}, weight.options());
  const auto fill = [&](auto element) {
    using T = decltype(element);
    const T* from = weight.const_data_ptr<T>();
    T* to = packed.mutable_data_ptr<T>();
    at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin * kPanel; n < std::min(outputs, end * kPanel); ++n) {
        T* column = to + n / kPanel * padded * kPanel + n % kPanel * kPack<T>;
        for (int64_t k = 0; k < inputs; ++k)
          column[k / kPack<T> * kPanel * kPack<T> + k % kPack<T>] = from[n * inputs + k];
      }
    });
  };
  if (weight.scalar_type() == at::kFloat) fill(float{});
  else fill(at::BFloat16{});
  return packed;
}

template <typename T>
void run(const at::Tensor& x, const at::Tensor& packed, const float* bias, at::Tensor& out) {
  const int64_t rows = x.size(0), outputs = out.size(1), panels = packed.size(0);
  const Product product{packed.size(1) / kPanel, outputs, x.stride(0), outputs};
  const Input<T>* from = x.const_data_ptr<Input<T>>();
  const T* weights = packed.const_data_ptr<T>();
  T* to = out.mutable_data_ptr<T>();
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, rows * packed.size(1)));
  at::parallel_for(0, panels, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = 0; row < rows; row += kRowBlock)
      for (int64_t p = begin; p < end; ++p)
        pass<T>(product, std::min(kRowBlock, rows - row), from + row * product.x_stride, weights + p * packed.size(1),
             bias == nullptr ? nullptr : bias + p * kPanel, std::min(kPanel, outputs - p * kPanel),
             to + row * outputs + p * kPanel);
  });
}

at::Tensor packed_linear(const at::Tensor& x_in, const at::Tensor& packed, int64_t outputs,
                         const std::optional<at::Tensor>& bias) {
  TORCH_CHECK_VALUE(x_in.dim() == 2, "packed_linear: x must be [T, K]");
  TORCH_CHECK_TYPE(can_pack(x_in.scalar_type()) && packed.scalar_type() == x_in.scalar_type(),
                   "packed_linear: x and weight differ in type");
  const int64_t inputs = x_in.size(1), padded = padded_inputs(inputs, x_in.scalar_type());
  TORCH_CHECK_VALUE(packed.dim() == 2 && packed.size(1) == padded * kPanel &&
                        packed.size(0) == (outputs + kPanel - 1) / kPanel,
                    "packed_linear: the packed weight has another shape than ", outputs, " x ", inputs);
  TORCH_CHECK_VALUE(!bias || bias->numel() == outputs, "packed_linear: bias must have ", outputs, " values");
  at::Tensor x = x_in.stride(1) == 1 ? x_in : x_in.contiguous();
  if (padded != inputs) {
    at::Tensor wide = at::zeros({x.size(0), padded}, x.options());
    wide.narrow(1, 0, inputs).copy_(x);
    x = wide;
  }
  at::Tensor shift;
  if (bias) {
    // In float and to the end of the last panel, so that a tile reads it like any other.
    shift = at::zeros({packed.size(0) * kPanel}, bias->options().dtype(at::kFloat));
    shift.narrow(0, 0, outputs).copy_(*bias);
  }
  const float* shifts = shift.defined() ? shift.const_data_ptr<float>() : nullptr;
  at::Tensor out = at::empty({x.size(0), outputs}, x.options());
  if (x.scalar_type() == at::kBFloat16) {
    x = x.to(c10::CppTypeToScalarType<Input<at::BFloat16>>::value);
    run<at::BFloat16>(x, packed, shifts, out);
  } else {
    run<float>(x, packed, shifts, out);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY(sgl_kernel_ext_linear, library) {
  library.def("can_pack(ScalarType type) -> bool", &can_pack);
  library.def("pack_weight(Tensor weight) -> Tensor");
  library.def("packed_linear(Tensor x, Tensor packed, int outputs, Tensor? bias) -> Tensor");
}

TORCH_LIBRARY_IMPL(sgl_kernel_ext_linear, CPU, library) {
  library.impl("pack_weight", &pack_weight);
  library.impl("packed_linear", &packed_linear);
}
