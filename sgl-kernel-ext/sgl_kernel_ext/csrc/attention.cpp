// Paged attention on CPU. The specification is reference/attention.py.
//
// One work item is a tile of one request's query rows, one or all KV heads with their query heads, and a range of
// keys. Each block of keys is gathered from the paged cache once, as float, and used by the whole tile: two small
// matrix products around an online softmax. Items are handed to threads as they become free.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "simd.h"

namespace {

using namespace sgl_kernel_ext;

constexpr int64_t kBlockKeys = 64;      // keys gathered at once: K and V of a block stay in the L1/L2 cache
constexpr int64_t kTileQueries = 96;    // query rows x grouped heads that share one gathered block
constexpr int64_t kFewQueries = 16;     // up to here memory is the limit, and slots are read whole, head after head
constexpr int64_t kMinSplitKeys = 256;  // below this a split costs more than an idle thread
constexpr float kHidden = -std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();

// Registers hold kTileRows x kTileVecs accumulators plus the operands.
#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTileVecs = 4;
#else
constexpr int kTileRows = 6, kTileVecs = 2;
#endif

enum class Mode : int64_t { kCausal = 0, kBidirectional = 1, kTree = 2 };

inline int64_t round_up(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}

inline Vec vec_tanh(Vec x) {
  return 1.0f - 2.0f / (vec_exp(x + x) + 1.0f);
}

#if (defined(__clang__) || __GNUC__ >= 12) && defined(__AVX__)
inline Vec interleave_low(Vec a, Vec b) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#else
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#endif
}

inline Vec interleave_high(Vec a, Vec b) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
  return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#endif
}

// Interleaving each row of the first half with its partner in the second, log2(kLanes) times, transposes a square.
inline void transpose(Vec (&block)[kLanes]) {
  for (int64_t round = 1; round < kLanes; round *= 2) {
    Vec next[kLanes];
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = interleave_low(block[i], block[i + kLanes / 2]);
      next[2 * i + 1] = interleave_high(block[i], block[i + kLanes / 2]);
    }
    for (int i = 0; i < kLanes; ++i) block[i] = next[i];
  }
}
#else
inline void transpose(Vec (&block)[kLanes]) {
  Vec next[kLanes];
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kLanes; ++j) next[j][i] = block[i][j];
  for (int i = 0; i < kLanes; ++i) block[i] = next[i];
}
#endif

// ---- small matrix products ------------------------------------------------------------------------------------

// c[Rows, Vecs * kLanes] = a[Rows, depth] * b[depth, Vecs * kLanes], plus row_scale * c when kAdd.
template <int Rows, int Vecs, bool kAdd>
inline void product_tile(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth,
                         const float* row_scale, float* c, int64_t ldc) {
  Vec sum[Rows][Vecs];
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vecs; ++v) sum[r][v] = kAdd ? load(c + r * ldc + v * kLanes) * row_scale[r] : Vec{};
  for (int64_t k = 0; k < depth; ++k) {
    Vec right[Vecs];
    for (int v = 0; v < Vecs; ++v) right[v] = load(b + k * ldb + v * kLanes);
    for (int r = 0; r < Rows; ++r) {
      const Vec left = splat(a[r * lda + k]);
      for (int v = 0; v < Vecs; ++v) sum[r][v] += left * right[v];
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vecs; ++v) store(c + r * ldc + v * kLanes, sum[r][v]);
}

template <int Rows, int Vecs, bool kAdd>
inline void product_last_rows(int64_t rows, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth,
                              const float* row_scale, float* c, int64_t ldc) {
  if (rows == Rows) {
    product_tile<Rows, Vecs, kAdd>(a, lda, b, ldb, depth, row_scale, c, ldc);
  } else if constexpr (Rows > 1) {
    product_last_rows<Rows - 1, Vecs, kAdd>(rows, a, lda, b, ldb, depth, row_scale, c, ldc);
  }
}

template <int Vecs, bool kAdd>
inline void product_columns(int64_t rows, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth,
                            const float* row_scale, float* c, int64_t ldc) {
  int64_t m = 0;
  for (; m + kTileRows <= rows; m += kTileRows)
    product_tile<kTileRows, Vecs, kAdd>(a + m * lda, lda, b, ldb, depth, row_scale + m, c + m * ldc, ldc);
  product_last_rows<kTileRows - 1, Vecs, kAdd>(rows - m, a + m * lda, lda, b, ldb, depth, row_scale + m, c + m * ldc,
                                               ldc);
}

// columns is a multiple of kLanes.
template <bool kAdd>
void product(int64_t rows, int64_t columns, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth,
             const float* row_scale, float* c, int64_t ldc) {
  int64_t n = 0;
  for (; n + kTileVecs * kLanes <= columns; n += kTileVecs * kLanes)
    product_columns<kTileVecs, kAdd>(rows, a, lda, b + n, ldb, depth, row_scale, c + n, ldc);
  for (; n < columns; n += kLanes) product_columns<1, kAdd>(rows, a, lda, b + n, ldb, depth, row_scale, c + n, ldc);
}

// ---- gathering from the paged cache ---------------------------------------------------------------------------

// Slots are scattered, so the hardware cannot guess which lines come next.
template <typename T>
void prefetch(const T* cache, int64_t slot_stride, const int64_t* slots, int64_t count, int64_t dim) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t n = 0; n < count; ++n)
    for (int64_t d = 0; d < dim; d += kLine) __builtin_prefetch(cache + slots[n] * slot_stride + d, 0, 2);
}

// out[head_dim, kBlockKeys]: keys become columns, absent ones zeros.
template <typename T>
void gather_keys(const T* cache, int64_t slot_stride, const int64_t* slots, int64_t count, int64_t head_dim,
                 float* out) {
  for (int64_t n = 0; n < count; n += kLanes) {
    const int64_t present = std::min(kLanes, count - n);
    int64_t d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) {
      Vec block[kLanes];
      for (int64_t i = 0; i < kLanes; ++i)
        block[i] = i < present ? load(cache + slots[n + i] * slot_stride + d) : Vec{};
      transpose(block);
      for (int64_t i = 0; i < kLanes; ++i) store(out + (d + i) * kBlockKeys + n, block[i]);
    }
    for (; d < head_dim; ++d)
      for (int64_t i = 0; i < kLanes; ++i)
        out[d * kBlockKeys + n + i] = i < present ? static_cast<float>(cache[slots[n + i] * slot_stride + d]) : 0.0f;
  }
}

// out[count, ld]: rows as they are; columns behind value_dim keep what they hold and are never read back.
template <typename T>
void gather_values(const T* cache, int64_t slot_stride, const int64_t* slots, int64_t count, int64_t value_dim,
                   int64_t ld, float* out) {
  for (int64_t n = 0; n < count; ++n) {
    const T* row = cache + slots[n] * slot_stride;
    int64_t d = 0;
    for (; d + kLanes <= value_dim; d += kLanes) store(out + n * ld + d, load(row + d));
    for (; d < value_dim; ++d) out[n * ld + d] = static_cast<float>(row[d]);
  }
}

// ---- one call ---------------------------------------------------------------------------------------------------

struct Call {
  const at::Tensor &q, &k_cache, &v_cache, &slot_table;
  at::Tensor out;
  const int64_t *req_rows, *prefix_lens, *row_offsets;
  const bool* mask;
  int64_t mask_stride;
  const int64_t* depths;  // per row, only where a window needs positions in a tree
  float scaling, logit_cap;
  int64_t window;
  Mode mode;
  int64_t group, head_dim, value_dim, value_ld;
};

struct Item {
  int64_t request;
  int64_t head_begin, head_end;  // KV heads
  int64_t row_begin, row_end;  // within the request
  int64_t key_begin, key_end;  // within the request
  float* partial;              // where an item that sees only part of the keys leaves its state, else null
};

struct Range {
  int64_t begin, end;
};

// What one KV head of an item carries from block to block. Per query (row, grouped head): its vector, the weighted
// sum of values, the running maximum and the sum of weights.
struct HeadState {
  float *queries, *sums, *row_max, *row_sum;
};

// Scratch of one thread, kept between calls: fresh pages at every layer would cost more than the arithmetic.
class Scratch {
 public:
  float *keys, *values, *logits, *row_scale;

  void reserve(const Call& call, int64_t heads, int64_t queries_n) {
    const int64_t padded = round_up(queries_n, kLanes);
    sizes_ = {padded * call.head_dim, padded * call.value_ld, padded, padded};
    const int64_t shared[] = {call.head_dim * kBlockKeys, kBlockKeys * call.value_ld, padded * kBlockKeys, padded};
    head_size_ = std::accumulate(sizes_.begin(), sizes_.end(), int64_t{0});
    const int64_t total = kLanes + std::accumulate(std::begin(shared), std::end(shared), heads * head_size_);
    if (total > capacity_) {
      memory_ = std::make_unique<float[]>(total);
      capacity_ = total;
    }
    float* next = memory_.get();
    while (reinterpret_cast<uintptr_t>(next) % (kLanes * sizeof(float)) != 0) ++next;
    float** parts[] = {&keys, &values, &logits, &row_scale};
    for (size_t i = 0; i < std::size(shared); next += shared[i++]) *parts[i] = next;
    heads_ = next;
  }

  HeadState head(int64_t index) const {
    float* queries = heads_ + index * head_size_;
    float* sums = queries + sizes_[0];
    float* row_max = sums + sizes_[1];
    return {queries, sums, row_max, row_max + sizes_[2]};
  }

 private:
  std::unique_ptr<float[]> memory_;
  int64_t capacity_ = 0, head_size_ = 0;
  std::array<int64_t, 4> sizes_{};
  float* heads_ = nullptr;
};

// The positions [begin, end) that row `row` may see, before the tree mask.
Range visible_range(const Call& call, int64_t request, int64_t row) {
  const int64_t prefix = call.prefix_lens[request];
  const int64_t first_row = call.row_offsets[request];
  const int64_t total = prefix + call.row_offsets[request + 1] - first_row;
  Range range{0, call.mode == Mode::kCausal ? prefix + row + 1 : total};
  if (call.window < 0) return range;
  const int64_t position = prefix + (call.mode == Mode::kTree ? call.depths[first_row + row] : row);
  range.begin = std::max<int64_t>(0, position - call.window);
  if (call.mode == Mode::kTree) range.begin = std::min(range.begin, prefix);  // own rows carry depths, not indices
  if (call.mode == Mode::kBidirectional) range.end = std::min(total, position + call.window + 1);
  return range;
}

// The union of what the rows [begin, end) may see.
Range visible_union(const Call& call, int64_t request, int64_t row_begin, int64_t row_end) {
  Range all = visible_range(call, request, row_begin);
  for (int64_t row = row_begin + 1; row < row_end; ++row) {
    const Range range = visible_range(call, request, row);
    all = {std::min(all.begin, range.begin), std::max(all.end, range.end)};
  }
  return all;
}

void gather_slots(const Call& call, const Item& item, int64_t key, int64_t count, int64_t* slots) {
  const int64_t at = call.req_rows[item.request] * call.slot_table.stride(0) + key;
  const int64_t limit = call.k_cache.size(0);
  if (call.slot_table.scalar_type() == at::kInt) {
    const int32_t* table = call.slot_table.const_data_ptr<int32_t>() + at;
    for (int64_t i = 0; i < count; ++i) slots[i] = table[i];
  } else {
    const int64_t* table = call.slot_table.const_data_ptr<int64_t>() + at;
    for (int64_t i = 0; i < count; ++i) slots[i] = table[i];
  }
  for (int64_t i = 0; i < count; ++i)
    TORCH_CHECK_INDEX(slots[i] >= 0 && slots[i] < limit, "paged_attention: slot_table names slot ", slots[i],
                      " of a KV cache with ", limit, " slots");
}

template <typename T>
void gather_queries(const Call& call, const Item& item, int64_t kv_head, float* out) {
  const int64_t row_stride = call.q.stride(0), head_stride = call.q.stride(1);
  const T* q = call.q.const_data_ptr<T>() + (call.row_offsets[item.request] + item.row_begin) * row_stride +
               kv_head * call.group * head_stride;
  for (int64_t row = item.row_begin; row < item.row_end; ++row, q += row_stride)
    for (int64_t g = 0; g < call.group; ++g, out += call.head_dim)
      for (int64_t d = 0; d < call.head_dim; ++d)
        out[d] = static_cast<float>(q[g * head_stride + d]) * call.scaling;
}

// Overwrite the logits of keys that a row must not see. Rows of `logits` are (row, grouped head).
void hide_keys(const Call& call, const Item& item, int64_t key, int64_t count, float* logits) {
  const int64_t prefix = call.prefix_lens[item.request];
  const int64_t first_row = call.row_offsets[item.request];
  for (int64_t row = item.row_begin; row < item.row_end; ++row) {
    const Range range = visible_range(call, item.request, row);
    const int64_t begin = std::clamp<int64_t>(range.begin - key, 0, count);
    const int64_t end = std::clamp<int64_t>(range.end - key, 0, count);
    const int64_t own = std::clamp<int64_t>(prefix - key, 0, count);
    for (int64_t g = 0; g < call.group; ++g, logits += kBlockKeys) {
      std::fill(logits, logits + begin, kHidden);
      std::fill(logits + end, logits + count, kHidden);
      if (call.mode != Mode::kTree) continue;
      const bool* ancestors = call.mask + (first_row + row) * call.mask_stride + key - prefix;
      for (int64_t n = own; n < count; ++n) logits[n] = ancestors[n] ? logits[n] : kHidden;
      if (call.window < 0) continue;
      const int64_t* depths = call.depths + first_row + key - prefix;
      const int64_t shallowest = call.depths[first_row + row] - call.window;
      for (int64_t n = own; n < count; ++n) logits[n] = depths[n] >= shallowest ? logits[n] : kHidden;
    }
  }
}

void cap_logits(int64_t queries_n, int64_t padded, float cap, float* logits) {
  for (int64_t m = 0; m < queries_n; ++m, logits += kBlockKeys)
    for (int64_t n = 0; n < padded; n += kLanes) store(logits + n, cap * vec_tanh(load(logits + n) / cap));
}

// Turn a block's logits into weights against the running maximum. row_scale is left with the factor that brings
// what was summed under the previous maximum to the new one. Sixteen rows at a time, so that reducing along their
// keys is a transpose and a column-wise operation.
void update_softmax(int64_t queries_n, int64_t count, const Scratch& scratch, const HeadState& state) {
  const int64_t padded = round_up(count, kLanes);
  for (int64_t first = 0; first < queries_n; first += kLanes) {
    const int64_t rows = std::min(kLanes, queries_n - first);
    float* logits = scratch.logits + first * kBlockKeys;
    Vec lanes[kLanes];
    for (int64_t m = 0; m < kLanes; ++m) lanes[m] = splat(kHidden);
    for (int64_t m = 0; m < rows; ++m) {
      float* row = logits + m * kBlockKeys;
      std::fill(row + count, row + padded, kHidden);
      for (int64_t n = 0; n < padded; n += kLanes) lanes[m] = vec_max(lanes[m], load(row + n));
    }
    transpose(lanes);
    const Vec before = load(state.row_max + first);
    Vec now = before;
    for (int64_t i = 0; i < kLanes; ++i) now = vec_max(now, lanes[i]);
    const Vec base = vec_max(now, splat(kLowest));  // finite also for a row that has seen no key yet
    const Vec scale = vec_exp(before - base);
    store(state.row_max + first, now);
    store(scratch.row_scale + first, scale);

    for (int64_t m = 0; m < rows; ++m) {
      float* row = logits + m * kBlockKeys;
      Vec sum{};
      for (int64_t n = 0; n < padded; n += kLanes) {
        const Vec weight = vec_exp(load(row + n) - splat(base[m]));
        sum += weight;
        store(row + n, weight);
      }
      lanes[m] = sum;
    }
    for (int64_t m = rows; m < kLanes; ++m) lanes[m] = Vec{};
    transpose(lanes);
    Vec sum = load(state.row_sum + first) * scale;
    for (int64_t i = 0; i < kLanes; ++i) sum += lanes[i];
    store(state.row_sum + first, sum);
  }
}

template <typename T>
void write_rows(const Call& call, const Item& item, int64_t kv_head, const float* sums, const float* row_sum) {
  const int64_t heads = call.out.size(1);
  T* out = call.out.mutable_data_ptr<T>();
  for (int64_t row = item.row_begin; row < item.row_end; ++row) {
    T* to = out + ((call.row_offsets[item.request] + row) * heads + kv_head * call.group) * call.value_dim;
    for (int64_t g = 0; g < call.group; ++g, to += call.value_dim, sums += call.value_ld, ++row_sum) {
      const float factor = *row_sum > 0 ? 1.0f / *row_sum : 0.0f;
      for (int64_t d = 0; d < call.value_dim; ++d) to[d] = static_cast<T>(sums[d] * factor);
    }
  }
}

// The keys that every row of the item sees, so that blocks inside need no mask.
Range visible_to_all(const Call& call, const Item& item) {
  Range common{0, call.mode == Mode::kTree ? call.prefix_lens[item.request] : item.key_end};
  for (int64_t row = item.row_begin; row < item.row_end; ++row) {
    const Range range = visible_range(call, item.request, row);
    common = {std::max(common.begin, range.begin), std::min(common.end, range.end)};
  }
  return common;
}

int64_t item_queries(const Call& call, const Item& item) {
  return (item.row_end - item.row_begin) * call.group;
}

// What an item that sees only part of the keys leaves behind, per head: sums, row_max, row_sum.
int64_t partial_size(const Call& call, const Item& item) {
  return item_queries(call, item) * (call.value_ld + 2);
}

void write_partial(const Call& call, const Item& item, const HeadState& state, float* to) {
  const int64_t queries_n = item_queries(call, item);
  to = std::copy_n(state.sums, queries_n * call.value_ld, to);
  to = std::copy_n(state.row_max, queries_n, to);
  std::copy_n(state.row_sum, queries_n, to);
}

template <typename T>
void run_item(const Call& call, const Item& item) {
  static thread_local Scratch scratch;
  const int64_t queries_n = item_queries(call, item), heads = item.head_end - item.head_begin;
  const int64_t padded_queries = round_up(queries_n, kLanes);
  const at::ScalarType q_type = call.q.scalar_type();
  scratch.reserve(call, heads, queries_n);
  for (int64_t h = 0; h < heads; ++h) {
    const HeadState state = scratch.head(h);
    with_type(q_type, [&](auto q) { gather_queries<decltype(q)>(call, item, item.head_begin + h, state.queries); });
    std::fill_n(state.sums, queries_n * call.value_ld, 0.0f);
    std::fill_n(state.row_max, padded_queries, kHidden);
    std::fill_n(state.row_sum, padded_queries, 0.0f);
  }

  const Range common = visible_to_all(call, item);
  const int64_t k_slot = call.k_cache.stride(0), k_head = call.k_cache.stride(1);
  const int64_t v_slot = call.v_cache.stride(0), v_head = call.v_cache.stride(1);
  const T* all_keys = call.k_cache.const_data_ptr<T>() + item.head_begin * k_head;
  const T* all_values = call.v_cache.const_data_ptr<T>() + item.head_begin * v_head;
  int64_t slot_buffers[2][kBlockKeys];
  int64_t *slots = slot_buffers[0], *next_slots = slot_buffers[1];
  gather_slots(call, item, item.key_begin, std::min(kBlockKeys, item.key_end - item.key_begin), slots);
  for (int64_t key = item.key_begin; key < item.key_end; key += kBlockKeys, std::swap(slots, next_slots)) {
    const int64_t count = std::min(kBlockKeys, item.key_end - key);
    const int64_t padded = round_up(count, kLanes);
    const int64_t next_count = std::min(kBlockKeys, item.key_end - key - count);
    gather_slots(call, item, key + count, next_count, next_slots);
    for (int64_t h = 0; h < heads; ++h) {
      const HeadState state = scratch.head(h);
      const T *keys = all_keys + h * k_head, *values = all_values + h * v_head;
      prefetch(keys, k_slot, next_slots, next_count, call.head_dim);
      prefetch(values, v_slot, next_slots, next_count, call.value_dim);
      gather_keys(keys, k_slot, slots, count, call.head_dim, scratch.keys);
      product<false>(queries_n, padded, state.queries, call.head_dim, scratch.keys, kBlockKeys, call.head_dim,
                     scratch.row_scale, scratch.logits, kBlockKeys);
      if (call.logit_cap > 0) cap_logits(queries_n, padded, call.logit_cap, scratch.logits);
      if (key < common.begin || key + count > common.end) hide_keys(call, item, key, count, scratch.logits);
      update_softmax(queries_n, count, scratch, state);
      gather_values(values, v_slot, slots, count, call.value_dim, call.value_ld, scratch.values);
      product<true>(queries_n, call.value_ld, scratch.logits, kBlockKeys, scratch.values, call.value_ld, count,
                    scratch.row_scale, state.sums, call.value_ld);
    }
  }

  for (int64_t h = 0; h < heads; ++h) {
    const HeadState state = scratch.head(h);
    if (item.partial != nullptr) {
      write_partial(call, item, state, item.partial + h * partial_size(call, item));
    } else {
      with_type(q_type, [&](auto q) {
        write_rows<decltype(q)>(call, item, item.head_begin + h, state.sums, state.row_sum);
      });
    }
  }
}

// ---- splitting the work -----------------------------------------------------------------------------------------

struct Plan {
  std::vector<Item> items;
  std::vector<std::pair<int64_t, int64_t>> merges;  // [first, last) items that share their query rows
  at::Tensor partials;                              // owns the memory of Item::partial
  int64_t cost = 0;
};

// Roughly proportional to time: gathering a key costs about as much as multiplying it with sixteen queries.
int64_t item_cost(const Call& call, const Item& item) {
  return (item_queries(call, item) + 16) * (item.key_end - item.key_begin) * (item.head_end - item.head_begin);
}

std::vector<Item> make_tiles(const Call& call, int64_t requests, int64_t threads) {
  const int64_t kv_heads = call.k_cache.size(1);
  const int64_t tile_rows = std::max<int64_t>(1, kTileQueries / call.group);
  std::vector<Item> tiles;
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t rows = call.row_offsets[r + 1] - call.row_offsets[r];
    for (int64_t row = 0; row < rows; row += tile_rows) {
      const int64_t row_end = std::min(rows, row + tile_rows);
      const Range keys = visible_union(call, r, row, row_end);
      const bool enough_work = requests >= 2 * threads || keys.end - keys.begin >= 2 * kMinSplitKeys;
      const int64_t heads = (row_end - row) * call.group <= kFewQueries && enough_work ? kv_heads : 1;
      for (int64_t h = 0; h < kv_heads; h += heads)
        tiles.push_back({r, h, h + heads, row, row_end, keys.begin, keys.end, nullptr});
    }
  }
  return tiles;
}

// Cut tiles whose keys would keep one thread busy while the others have run out of work.
Plan make_plan(const Call& call, int64_t requests, int64_t threads) {
  Plan plan;
  const std::vector<Item> tiles = make_tiles(call, requests, threads);
  for (const Item& tile : tiles) plan.cost += item_cost(call, tile);
  const int64_t fair_share = std::max<int64_t>(1, plan.cost / (3 * threads));
  int64_t floats = 0;
  std::vector<int64_t> partial_at;
  for (const Item& tile : tiles) {
    const int64_t keys = tile.key_end - tile.key_begin;
    const int64_t wanted = threads == 1 ? 1 : (item_cost(call, tile) + fair_share - 1) / fair_share;
    const int64_t pieces = std::clamp<int64_t>(keys / kMinSplitKeys, 1, wanted);
    const int64_t length = round_up((keys + pieces - 1) / pieces, kBlockKeys);
    const int64_t first = static_cast<int64_t>(plan.items.size());
    for (int64_t key = tile.key_begin; key < tile.key_end; key += length) {
      Item item = tile;
      item.key_begin = key;
      item.key_end = std::min(tile.key_end, key + length);
      plan.items.push_back(item);
    }
    const int64_t last = static_cast<int64_t>(plan.items.size());
    partial_at.resize(last, -1);
    if (last - first < 2) continue;
    plan.merges.emplace_back(first, last);
    for (int64_t i = first; i < last; ++i) {
      partial_at[i] = floats;
      floats += partial_size(call, tile) * (tile.head_end - tile.head_begin);
    }
  }
  if (floats > 0) {
    plan.partials = at::empty({floats}, call.q.options().dtype(at::kFloat));
    float* base = plan.partials.mutable_data_ptr<float>();
    for (size_t i = 0; i < plan.items.size(); ++i)
      if (partial_at[i] >= 0) plan.items[i].partial = base + partial_at[i];
  }
  return plan;
}

// Combine what the items [first, last) over the same rows and different keys left behind, and write the rows.
void merge(const Call& call, const Plan& plan, int64_t first, int64_t last) {
  const Item& item = plan.items[first];
  const int64_t queries_n = item_queries(call, item), ld = call.value_ld;
  for (int64_t h = 0; h < item.head_end - item.head_begin; ++h) {
    const int64_t at = h * partial_size(call, item);
    float* sums = item.partial + at;
    float* row_max = sums + queries_n * ld;
    float* row_sum = row_max + queries_n;
    for (int64_t i = first + 1; i < last; ++i) {
      const float* other_sums = plan.items[i].partial + at;
      const float* other_max = other_sums + queries_n * ld;
      const float* other_sum = other_max + queries_n;
      for (int64_t m = 0; m < queries_n; ++m) {
        const float top = std::max(row_max[m], other_max[m]);
        if (top == kHidden) continue;
        const float mine = std::exp(row_max[m] - top), theirs = std::exp(other_max[m] - top);
        for (int64_t d = m * ld; d < (m + 1) * ld; ++d) sums[d] = mine * sums[d] + theirs * other_sums[d];
        row_sum[m] = mine * row_sum[m] + theirs * other_sum[m];
        row_max[m] = top;
      }
    }
    with_type(call.q.scalar_type(), [&](auto q) {
      write_rows<decltype(q)>(call, item, item.head_begin + h, sums, row_sum);
    });
  }
}

// Threads take the next index as they finish one, because items differ widely in cost.
template <typename Fn>
void for_each_index(int64_t count, int64_t threads, const Fn& fn) {
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) fn(i);
  };
  const int64_t workers = std::min(threads, count);
  if (workers <= 1) {
    work(0, 1);
  } else {
    at::parallel_for(0, workers, 1, work);
  }
}

std::vector<int64_t> tree_depths(const Call& call, int64_t requests) {
  std::vector<int64_t> depths(call.row_offsets[requests]);
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t rows = call.row_offsets[r + 1] - call.row_offsets[r];
    for (int64_t row = call.row_offsets[r]; row < call.row_offsets[r + 1]; ++row) {
      const bool* ancestors = call.mask + row * call.mask_stride;
      depths[row] = std::count(ancestors, ancestors + rows, true) - 1;
    }
  }
  return depths;
}

void check_layout(const Call& call, int64_t requests) {
  TORCH_CHECK_VALUE(call.row_offsets[0] == 0, "paged_attention: row_offsets must start at 0");
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t rows = call.row_offsets[r + 1] - call.row_offsets[r];
    TORCH_CHECK_VALUE(rows >= 0 && call.prefix_lens[r] >= 0, "paged_attention: request ", r, " has ", rows,
                      " rows and a prefix of ", call.prefix_lens[r]);
    TORCH_CHECK_INDEX(call.req_rows[r] >= 0 && call.req_rows[r] < call.slot_table.size(0),
                      "paged_attention: slot_table has no row ", call.req_rows[r]);
    TORCH_CHECK_VALUE(call.prefix_lens[r] + rows <= call.slot_table.size(1), "paged_attention: request ", r,
                      " is longer than a row of slot_table");
    TORCH_CHECK_VALUE(call.mode != Mode::kTree || rows <= call.mask_stride, "paged_attention: request ", r, " has ",
                      rows, " rows, more than its ancestor mask has columns");
  }
  TORCH_CHECK_VALUE(call.row_offsets[requests] <= call.q.size(0), "paged_attention: q has fewer rows than row_offsets");
}

at::Tensor paged_attention(const at::Tensor& q_in, const at::Tensor& k_cache, const at::Tensor& v_cache,
                           const at::Tensor& slot_table, const at::Tensor& req_rows_in,
                           const at::Tensor& prefix_lens_in, const at::Tensor& row_offsets_in, double scaling,
                           int64_t mode, const std::optional<at::Tensor>& ancestor_mask, double logit_cap,
                           int64_t sliding_window) {
  TORCH_CHECK_VALUE(k_cache.stride(2) == 1 && v_cache.stride(2) == 1 && slot_table.stride(1) == 1,
                    "paged_attention: the last dimension of k_cache, v_cache and slot_table must be contiguous");
  TORCH_CHECK_TYPE(k_cache.scalar_type() == v_cache.scalar_type(), "paged_attention: K and V differ in type");
  TORCH_CHECK_TYPE(slot_table.scalar_type() == at::kInt || slot_table.scalar_type() == at::kLong,
                   "paged_attention: slot_table must be int32 or int64");
  const int64_t requests = req_rows_in.numel();
  TORCH_CHECK_VALUE(prefix_lens_in.numel() == requests && row_offsets_in.numel() == requests + 1,
                    "paged_attention: req_rows, prefix_lens and row_offsets disagree on the number of requests");
  const at::Tensor q = q_in.stride(2) == 1 ? q_in : q_in.contiguous();
  const at::Tensor req_rows = req_rows_in.to(at::kLong).contiguous();
  const at::Tensor prefix_lens = prefix_lens_in.to(at::kLong).contiguous();
  const at::Tensor row_offsets = row_offsets_in.to(at::kLong).contiguous();
  const at::Tensor mask = ancestor_mask ? ancestor_mask->to(at::kBool).contiguous() : at::Tensor();

  Call call{q, k_cache, v_cache, slot_table};
  call.out = at::empty({q.size(0), q.size(1), v_cache.size(2)}, q.options());
  call.req_rows = req_rows.const_data_ptr<int64_t>();
  call.prefix_lens = prefix_lens.const_data_ptr<int64_t>();
  call.row_offsets = row_offsets.const_data_ptr<int64_t>();
  call.mask = mask.defined() ? mask.const_data_ptr<bool>() : nullptr;
  call.mask_stride = mask.defined() ? mask.size(1) : 0;
  call.scaling = static_cast<float>(scaling);
  call.logit_cap = static_cast<float>(logit_cap);
  call.window = sliding_window;
  call.mode = static_cast<Mode>(mode);
  call.group = q.size(1) / k_cache.size(1);
  call.head_dim = q.size(2);
  call.value_dim = v_cache.size(2);
  call.value_ld = round_up(call.value_dim, kLanes);
  check_layout(call, requests);
  TORCH_CHECK_VALUE(!mask.defined() || mask.size(0) >= call.row_offsets[requests],
                    "paged_attention: the ancestor mask has fewer rows than row_offsets");
  std::vector<int64_t> depths;
  if (call.mode == Mode::kTree && call.window >= 0) depths = tree_depths(call, requests);
  call.depths = depths.data();

  const int64_t real_rows = call.row_offsets[requests];
  if (real_rows < q.size(0)) call.out.narrow(0, real_rows, q.size(0) - real_rows).zero_();

  const int64_t threads = at::get_num_threads();
  const Plan plan = make_plan(call, requests, threads);
  with_type(k_cache.scalar_type(), [&](auto element) {
    for_each_index(plan.items.size(), threads, [&](int64_t i) { run_item<decltype(element)>(call, plan.items[i]); });
  });
  for_each_index(plan.merges.size(), threads,
                 [&](int64_t i) { merge(call, plan, plan.merges[i].first, plan.merges[i].second); });
  return call.out;
}

}  // namespace

TORCH_LIBRARY(sgl_kernel_ext_attention, library) {
  library.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor slot_table, Tensor req_rows, "
      "Tensor prefix_lens, Tensor row_offsets, float scaling, int mode, Tensor? ancestor_mask, float logit_cap, "
      "int sliding_window) -> Tensor");
}

TORCH_LIBRARY_IMPL(sgl_kernel_ext_attention, CPU, library) {
  library.impl("paged_attention", &paged_attention);
}
