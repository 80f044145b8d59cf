// What a transformer layer does between its matrix products, on CPU. The specifications are reference/layers.py and
// reference/kv.py.
//
// Every row is computed by itself, in float32, so its result does not depend on the other rows or on the threads.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "simd.h"

namespace {

using namespace sgl_kernel_ext;

constexpr int64_t kGrain = 32768;  // values that one thread should have at least: waking another costs as much

template <typename Fn>
void for_each_row(int64_t rows, int64_t values_per_row, const Fn& fn) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, values_per_row));
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) fn(row);
  });
}

// The last values of a row whose length is no multiple of kLanes; missing ones are zeros.
template <typename T>
inline Vec load_some(const T* from, int64_t count) {
  alignas(64) T padded[kLanes] = {};
  std::memcpy(static_cast<void*>(padded), from, count * sizeof(T));
  return load(padded);
}

template <typename T>
inline void store_some(T* to, Vec value, int64_t count) {
  alignas(64) T padded[kLanes];
  store(padded, value);
  std::memcpy(static_cast<void*>(to), padded, count * sizeof(T));
}

// fn(at, load function, store function) for every group of kLanes values, the last one perhaps shorter.
template <typename Fn>
inline void for_each_group(int64_t size, const Fn& fn) {
  int64_t at = 0;
  for (; at + kLanes <= size; at += kLanes) {
    fn(
        at, [](const auto* from) { return load(from); }, [](auto* to, Vec value) { store(to, value); });
  }
  if (at < size) {
    const int64_t left = size - at;
    fn(
        at, [left](const auto* from) { return load_some(from, left); },
        [left](auto* to, Vec value) { store_some(to, value, left); });
  }
}

inline float sum_lanes(Vec value) {
  for (int64_t width = kLanes / 2; width > 0; width /= 2)
    for (int64_t i = 0; i < width; ++i) value[i] += value[i + width];
  return value[0];
}

// ---- norms ------------------------------------------------------------------------------------------------------

// out = values / rms(values) * weight. `values` may be `out`'s row in float, or any row of T.
template <typename From, typename T>
void norm_row(const From* values, const T* weight, int64_t size, float eps, T* out) {
  Vec sums[4] = {};
  int64_t group = 0;
  for_each_group(size, [&](int64_t at, auto read, auto) {
    const Vec value = read(values + at);
    sums[group++ % 4] += value * value;
  });
  const float mean = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<float>(size);
  const float scale = 1.0f / std::sqrt(mean + eps);
  for_each_group(size, [&](int64_t at, auto read, auto write) {
    write(out + at, read(values + at) * scale * read(weight + at));
  });
}

void check_norm(const at::Tensor& x, const at::Tensor& weight) {
  TORCH_CHECK_VALUE(x.dim() == 2 && x.stride(1) == 1, "rms_norm: x must be [T, H] with contiguous rows");
  TORCH_CHECK_VALUE(weight.dim() == 1 && weight.size(0) == x.size(1) && weight.is_contiguous(),
                    "rms_norm: weight must have the ", x.size(1), " values of a row");
  TORCH_CHECK_TYPE(weight.scalar_type() == x.scalar_type(), "rms_norm: x and weight differ in type");
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  check_norm(x, weight);
  const int64_t rows = x.size(0), size = x.size(1);
  at::Tensor out = at::empty({rows, size}, x.options());
  with_type(x.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const T *from = x.const_data_ptr<T>(), *w = weight.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    const int64_t stride = x.stride(0);
    for_each_row(rows, size, [&](int64_t row) {
      norm_row(from + row * stride, w, size, static_cast<float>(eps), to + row * size);
    });
  });
  return out;
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                                const at::Tensor& weight, double eps) {
  check_norm(x, weight);
  TORCH_CHECK_VALUE(residual.sizes() == x.sizes() && residual.stride(1) == 1,
                    "add_rms_norm: residual must have x's shape and contiguous rows");
  TORCH_CHECK_TYPE(residual.scalar_type() == x.scalar_type(), "add_rms_norm: x and residual differ in type");
  const int64_t rows = x.size(0), size = x.size(1);
  at::Tensor out = at::empty({rows, size}, x.options()), total = at::empty({rows, size}, x.options());
  with_type(x.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const T *from = x.const_data_ptr<T>(), *old = residual.const_data_ptr<T>(), *w = weight.const_data_ptr<T>();
    T *to = out.mutable_data_ptr<T>(), *sum_to = total.mutable_data_ptr<T>();
    const int64_t stride = x.stride(0), old_stride = residual.stride(0);
    for_each_row(rows, size, [&](int64_t row) {
      // The norm sees the sum before it is rounded to the residual's type.
      static thread_local std::vector<float> sum;
      sum.resize(size);
      for_each_group(size, [&](int64_t at, auto read, auto write) {
        const Vec value = read(from + row * stride + at) + read(old + row * old_stride + at);
        write(sum.data() + at, value);
        write(sum_to + row * size + at, value);
      });
      norm_row(sum.data(), w, size, static_cast<float>(eps), to + row * size);
    });
  });
  return {out, total};
}

// ---- activation -------------------------------------------------------------------------------------------------

at::Tensor silu_and_mul(const at::Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() == 2 && x.stride(1) == 1 && x.size(1) % 2 == 0,
                    "silu_and_mul: x must be [T, 2 * D] with contiguous rows");
  const int64_t rows = x.size(0), size = x.size(1) / 2, stride = x.stride(0);
  at::Tensor out = at::empty({rows, size}, x.options());
  with_type(x.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const T* from = x.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    for_each_row(rows, 2 * size, [&](int64_t row) {
      const T *gate = from + row * stride, *up = gate + size;
      for_each_group(size, [&](int64_t at, auto read, auto write) {
        const Vec value = read(gate + at);
        write(to + row * size + at, value / (1.0f + vec_exp(-value)) * read(up + at));
      });
    });
  });
  return out;
}

// ---- rotary embedding ---------------------------------------------------------------------------------------------

// What the rotary embedding needs to know beside q and k.
struct Rotation {
  at::Tensor positions, cos_sin, axes;  // axes undefined: one axis
  bool neox;
  int64_t half;  // rotated pairs of a head

  Rotation(const at::Tensor& positions_in, const at::Tensor& cos_sin_in, const std::optional<at::Tensor>& axes_in,
           bool neox_in, int64_t rows, int64_t head_dim)
      : positions(positions_in.to(at::kLong)), cos_sin(cos_sin_in), neox(neox_in), half(cos_sin_in.size(1) / 2) {
    TORCH_CHECK_VALUE(cos_sin.dim() == 2 && cos_sin.is_contiguous() && 2 * half <= head_dim,
                      "rotate: cos_sin must be contiguous [P, R] with R at most the head size");
    if (positions.dim() == 2) {
      TORCH_CHECK_VALUE(axes_in.has_value() && axes_in->numel() == half && positions.size(0) == 3,
                        "rotate: positions [3, T] need the axis of each of the ", half, " pairs");
      axes = axes_in->to(at::kLong).contiguous();
    }
    TORCH_CHECK_VALUE(positions.size(-1) == rows, "rotate: ", positions.size(-1), " positions for ", rows, " rows");
    positions = positions.contiguous();
    const int64_t* values = positions.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < positions.numel(); ++i)
      TORCH_CHECK_INDEX(values[i] >= 0 && values[i] < cos_sin.size(0), "rotate: position ", values[i],
                        " is not among the ", cos_sin.size(0), " of cos_sin");
  }

  // cos[half], sin[half] of one row, as float.
  template <typename C>
  void angles(int64_t row, float* cos, float* sin) const {
    const C* table = cos_sin.const_data_ptr<C>();
    const int64_t* at = positions.const_data_ptr<int64_t>();
    if (!axes.defined()) {
      const C* from = table + at[row] * 2 * half;
      for (int64_t i = 0; i < half; ++i) cos[i] = static_cast<float>(from[i]);
      for (int64_t i = 0; i < half; ++i) sin[i] = static_cast<float>(from[half + i]);
      return;
    }
    const int64_t rows = positions.size(1);
    const int64_t* axis = axes.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < half; ++i) {
      const C* from = table + at[axis[i] * rows + row] * 2 * half;
      cos[i] = static_cast<float>(from[i]);
      sin[i] = static_cast<float>(from[half + i]);
    }
  }
};

// One head: out may be `from`.
template <typename From, typename T>
void rotate_head(const From* from, const float* cos, const float* sin, int64_t half, int64_t head_dim, bool neox,
                 T* out) {
  if (neox) {
    for_each_group(half, [&](int64_t at, auto read, auto write) {
      const Vec first = read(from + at), second = read(from + half + at), c = read(cos + at), s = read(sin + at);
      write(out + at, first * c - second * s);
      write(out + half + at, second * c + first * s);
    });
  } else {
    for (int64_t i = 0; i < half; ++i) {
      const float first = static_cast<float>(from[2 * i]), second = static_cast<float>(from[2 * i + 1]);
      out[2 * i] = static_cast<T>(first * cos[i] - second * sin[i]);
      out[2 * i + 1] = static_cast<T>(second * cos[i] + first * sin[i]);
    }
  }
  for (int64_t i = 2 * half; i < head_dim; ++i) out[i] = static_cast<T>(static_cast<float>(from[i]));
}

std::tuple<at::Tensor, at::Tensor> rotate(const at::Tensor& q, const at::Tensor& k, const at::Tensor& positions,
                                          const at::Tensor& cos_sin, int64_t head_dim,
                                          const std::optional<at::Tensor>& axes, bool neox) {
  for (const at::Tensor* x : {&q, &k})
    TORCH_CHECK_VALUE(x->dim() == 2 && x->stride(1) == 1 && x->size(1) % head_dim == 0 && x->size(0) == q.size(0),
                      "rotate: q and k must be [T, heads * head_dim] with contiguous rows");
  TORCH_CHECK_TYPE(q.scalar_type() == k.scalar_type(), "rotate: q and k differ in type");
  const int64_t rows = q.size(0);
  const Rotation rotation(positions, cos_sin, axes, neox, rows, head_dim);
  at::Tensor q_out = at::empty({rows, q.size(1)}, q.options()), k_out = at::empty({rows, k.size(1)}, k.options());
  with_type(cos_sin.scalar_type(), [&](auto angle) {
    with_type(q.scalar_type(), [&](auto element) {
      using T = decltype(element);
      const at::Tensor* from[] = {&q, &k};
      at::Tensor* to[] = {&q_out, &k_out};
      for_each_row(rows, q.size(1) + k.size(1), [&](int64_t row) {
        static thread_local std::vector<float> angles;
        angles.resize(2 * rotation.half);
        float *cos = angles.data(), *sin = cos + rotation.half;
        rotation.angles<decltype(angle)>(row, cos, sin);
        for (int64_t i = 0; i < 2; ++i) {
          const int64_t width = from[i]->size(1);
          const T* in = from[i]->const_data_ptr<T>() + row * from[i]->stride(0);
          T* out = to[i]->mutable_data_ptr<T>() + row * width;
          for (int64_t at = 0; at < width; at += head_dim)
            rotate_head(in + at, cos, sin, rotation.half, head_dim, neox, out + at);
        }
      });
    });
  });
  return {q_out, k_out};
}

// ---- KV cache -----------------------------------------------------------------------------------------------------

// A cache whose slots can be copied as bytes.
struct Slots {
  char* base;
  int64_t stride, bytes, count;

  explicit Slots(const at::Tensor& cache)
      : base(static_cast<char*>(cache.mutable_data_ptr())),
        stride(cache.stride(0) * cache.element_size()),
        bytes(cache.numel() / std::max<int64_t>(1, cache.size(0)) * cache.element_size()),
        count(cache.size(0)) {
    TORCH_CHECK_VALUE(cache.size(0) < 2 || cache.select(0, 0).is_contiguous(), "KV cache: a slot must be contiguous");
  }
};

const int64_t* checked_slots(const at::Tensor& slots, int64_t limit) {
  TORCH_CHECK_TYPE(slots.scalar_type() == at::kLong, "KV cache: slots must be int64");
  const int64_t* values = slots.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < slots.numel(); ++i)
    TORCH_CHECK_INDEX(values[i] >= 0 && values[i] < limit, "KV cache: slot ", values[i], " of ", limit);
  return values;
}

void store_kv(const at::Tensor& k_in, const at::Tensor& v_in, const at::Tensor& k_cache, const at::Tensor& v_cache,
              const at::Tensor& slots_in) {
  const at::Tensor slots = slots_in.contiguous();
  const at::Tensor* rows_of[] = {&k_in, &v_in};
  const at::Tensor* caches[] = {&k_cache, &v_cache};
  for (int64_t i = 0; i < 2; ++i) {
    const at::Tensor& rows = *rows_of[i];
    const at::Tensor& cache = *caches[i];
    TORCH_CHECK_VALUE(rows.dim() == 3 && cache.dim() == 3 && rows.size(1) == cache.size(1) &&
                          rows.size(2) == cache.size(2) && rows.size(0) == slots.numel(),
                      "store_kv: K and V must be [T, heads, head_dim] for T slots of their caches");
    TORCH_CHECK_TYPE(rows.scalar_type() == cache.scalar_type(), "store_kv: rows and cache differ in type");
    const bool flat = rows.stride(2) == 1 && (rows.size(1) == 1 || rows.stride(1) == rows.size(2));
    const at::Tensor source = flat ? rows : rows.contiguous();
    const Slots to(cache);
    const int64_t* at = checked_slots(slots, to.count);
    const char* from = static_cast<const char*>(source.const_data_ptr());
    const int64_t stride = source.stride(0) * source.element_size();
    for_each_row(slots.numel(), cache.size(1) * cache.size(2), [&](int64_t row) {
      std::memcpy(to.base + at[row] * to.stride, from + row * stride, to.bytes);
    });
  }
}

at::Tensor rotate_and_store(const at::Tensor& qkv, int64_t q_heads, const at::Tensor& positions,
                            const at::Tensor& cos_sin, const std::optional<at::Tensor>& axes, bool neox,
                            const at::Tensor& k_cache, const at::Tensor& v_cache, const at::Tensor& slots_in,
                            const std::optional<at::Tensor>& q_norm, const std::optional<at::Tensor>& k_norm,
                            double eps) {
  TORCH_CHECK_VALUE(k_cache.dim() == 3 && v_cache.dim() == 3 && k_cache.size(1) == v_cache.size(1),
                    "rotate_and_store: k_cache and v_cache must be [slots, heads, head_dim]");
  const int64_t rows = qkv.size(0), head_dim = k_cache.size(2), kv_heads = k_cache.size(1);
  const int64_t rotated = (q_heads + kv_heads) * head_dim;
  TORCH_CHECK_VALUE(qkv.dim() == 2 && qkv.stride(1) == 1 && qkv.size(1) == rotated + kv_heads * v_cache.size(2),
                    "rotate_and_store: qkv must hold q, k and v of every row");
  TORCH_CHECK_TYPE(qkv.scalar_type() == k_cache.scalar_type() && qkv.scalar_type() == v_cache.scalar_type(),
                   "rotate_and_store: qkv and caches differ in type");
  for (const auto& norm : {q_norm, k_norm})
    TORCH_CHECK_VALUE(!norm || (norm->numel() == head_dim && norm->is_contiguous() &&
                                norm->scalar_type() == qkv.scalar_type()),
                      "rotate_and_store: a norm must have the values and the type of a head");
  const Rotation rotation(positions, cos_sin, axes, neox, rows, head_dim);
  const at::Tensor slots = slots_in.contiguous();
  TORCH_CHECK_VALUE(slots.numel() == rows, "rotate_and_store: ", slots.numel(), " slots for ", rows, " rows");
  const Slots keys(k_cache), values(v_cache);
  const int64_t* slot = checked_slots(slots, std::min(keys.count, values.count));
  at::Tensor q_out = at::empty({rows, q_heads, head_dim}, qkv.options());
  with_type(cos_sin.scalar_type(), [&](auto angle) {
    with_type(qkv.scalar_type(), [&](auto element) {
      using T = decltype(element);
      const T* q_weight = q_norm ? q_norm->const_data_ptr<T>() : nullptr;
      const T* k_weight = k_norm ? k_norm->const_data_ptr<T>() : nullptr;
      const T* from = qkv.const_data_ptr<T>();
      T* q_to = q_out.mutable_data_ptr<T>();
      for_each_row(rows, qkv.size(1), [&](int64_t row) {
        static thread_local std::vector<float> angles;
        static thread_local std::vector<T> normed;
        angles.resize(2 * rotation.half);
        normed.resize(head_dim);
        float *cos = angles.data(), *sin = cos + rotation.half;
        rotation.angles<decltype(angle)>(row, cos, sin);
        const T* in = from + row * qkv.stride(0);
        T* k_to = reinterpret_cast<T*>(keys.base + slot[row] * keys.stride);
        for (int64_t head = 0; head < q_heads + kv_heads; ++head, in += head_dim) {
          const bool is_q = head < q_heads;
          const T* weight = is_q ? q_weight : k_weight;
          const T* head_in = in;
          if (weight != nullptr) {
            norm_row(in, weight, head_dim, static_cast<float>(eps), normed.data());
            head_in = normed.data();
          }
          T* out = is_q ? q_to + (row * q_heads + head) * head_dim : k_to + (head - q_heads) * head_dim;
          rotate_head(head_in, cos, sin, rotation.half, head_dim, neox, out);
        }
        std::memcpy(values.base + slot[row] * values.stride, in, values.bytes);
      });
    });
  });
  return q_out;
}

void compact_kv(const std::vector<at::Tensor>& caches, const at::Tensor& target_in, const at::Tensor& source_in) {
  const at::Tensor target = target_in.flatten().contiguous(), source = source_in.flatten().contiguous();
  TORCH_CHECK_VALUE(target.numel() == source.numel(), "compact_kv: as many targets as sources expected");
  TORCH_CHECK_TYPE(target.scalar_type() == at::kLong && source.scalar_type() == at::kLong,
                   "compact_kv: target and source must be int64");
  std::vector<std::pair<int64_t, int64_t>> moves;
  const int64_t *to = target.const_data_ptr<int64_t>(), *from = source.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < target.numel(); ++i)
    if (to[i] != from[i]) moves.emplace_back(to[i], from[i]);
  if (moves.empty()) return;
  std::vector<Slots> slots;
  slots.reserve(caches.size());
  for (const at::Tensor& cache : caches) {
    slots.emplace_back(cache);
    for (const auto& [a, b] : moves)
      TORCH_CHECK_INDEX(std::min(a, b) >= 0 && std::max(a, b) < slots.back().count, "compact_kv: move from slot ", b,
                        " to ", a, " in a cache of ", slots.back().count);
  }
  at::parallel_for(0, slots.size(), 8, [&](int64_t begin, int64_t end) {
    std::vector<char> rows;  // all read before any is written
    for (int64_t i = begin; i < end; ++i) {
      const Slots& cache = slots[i];
      rows.resize(moves.size() * cache.bytes);
      char* row = rows.data();
      for (const auto& [a, b] : moves) {
        std::memcpy(row, cache.base + b * cache.stride, cache.bytes);
        row += cache.bytes;
      }
      row = rows.data();
      for (const auto& [a, b] : moves) {
        std::memcpy(cache.base + a * cache.stride, row, cache.bytes);
        row += cache.bytes;
      }
    }
  });
}

}  // namespace

TORCH_LIBRARY(sgl_kernel_ext_layers, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  library.def("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)");
  library.def("silu_and_mul(Tensor x) -> Tensor");
  library.def(
      "rotate(Tensor q, Tensor k, Tensor positions, Tensor cos_sin, int head_dim, Tensor? axes, bool neox) -> "
      "(Tensor, Tensor)");
  library.def("store_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> ()");
  library.def(
      "rotate_and_store(Tensor qkv, int q_heads, Tensor positions, Tensor cos_sin, Tensor? axes, bool neox, "
      "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, Tensor? q_norm, Tensor? k_norm, float eps) -> Tensor");
  library.def("compact_kv(Tensor(a!)[] caches, Tensor target, Tensor source) -> ()");
}

TORCH_LIBRARY_IMPL(sgl_kernel_ext_layers, CPU, library) {
  library.impl("rms_norm", &rms_norm);
  library.impl("add_rms_norm", &add_rms_norm);
  library.impl("silu_and_mul", &silu_and_mul);
  library.impl("rotate", &rotate);
  library.impl("store_kv", &store_kv);
  library.impl("rotate_and_store", &rotate_and_store);
  library.impl("compact_kv", &compact_kv);
}
