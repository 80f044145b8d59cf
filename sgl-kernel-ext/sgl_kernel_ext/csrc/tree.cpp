// Draft trees on CPU. The specification of every function, shapes included, is reference/tree.py.
//
// Integers are identical to the reference's. Floats too, except log_probs: there the sum over the vocabulary is taken
// in another order (partial sums of 1024 entries in float, their total in double). Every function also runs on
// meta tensors, where it returns the shapes, so that a round can be traced without data.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <queue>
#include <tuple>
#include <type_traits>
#include <vector>

#include "vec.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

using namespace sgl_kernel_ext;

constexpr float kNever = -std::numeric_limits<float>::infinity();  // log-probability of the impossible
constexpr int64_t kBlock = 4 * kLanes;   // entries that one test compares with the worst candidate so far
constexpr int64_t kChunk = 16 * kBlock;  // entries read twice, for the order and for the sum: they stay in L1
constexpr int64_t kDepthBits = 8, kFlatBits = 23;  // as in the reference

// Which of the kBlock entries are above the threshold, as bits; NaN is not.
inline uint64_t above(const float* block, float threshold) {
  uint64_t bits = 0;
#if defined(__AVX512F__)
  const __m512 limit = _mm512_set1_ps(threshold);
  for (int64_t i = 0; i < 4; ++i) {
    const __mmask16 mask = _mm512_cmp_ps_mask(_mm512_loadu_ps(block + i * kLanes), limit, _CMP_GT_OQ);
    bits |= static_cast<uint64_t>(mask) << (i * kLanes);
  }
#else
  bool any = false;
  for (int64_t i = 0; i < kBlock; ++i) any |= block[i] > threshold;  // vectorised, and mostly the answer
  for (int64_t i = 0; any && i < kBlock; ++i) bits |= static_cast<uint64_t>(block[i] > threshold) << i;
#endif
  return bits;
}

// The best entries of one row so far: logits descending, equal ones by smaller token id. NaN ranks with -inf.
class Best {
 public:
  Best(int64_t capacity, float* logits, int64_t* ids) : capacity_(capacity), logits_(logits), ids_(ids) {}

  bool full() const { return size_ == capacity_; }
  float largest() const { return logits_[0]; }
  float smallest() const { return logits_[capacity_ - 1]; }  // once full

  // Ids must come in ascending order: then an equal logit never displaces an earlier one.
  void offer(float logit, int64_t id) {
    if (std::isnan(logit)) logit = kNever;
    if (full() && !(logit > smallest())) return;
    int64_t at = full() ? capacity_ - 1 : size_++;
    for (; at > 0 && logit > logits_[at - 1]; --at) {
      logits_[at] = logits_[at - 1];
      ids_[at] = ids_[at - 1];
    }
    logits_[at] = logit;
    ids_[at] = id;
  }

 private:
  int64_t capacity_, size_ = 0;
  float* logits_;
  int64_t* ids_;
};

void scan_chunk(const float* chunk, int64_t count, int64_t first_id, Best& best) {
  int64_t begin = 0;
  for (; begin < count && !best.full(); ++begin) best.offer(chunk[begin], first_id + begin);
  for (; begin < count && begin % kBlock != 0; ++begin) best.offer(chunk[begin], first_id + begin);
  for (; begin < count; begin += kBlock)
    for (uint64_t bits = above(chunk + begin, best.smallest()); bits != 0; bits &= bits - 1) {
      const int64_t i = begin + __builtin_ctzll(bits);
      best.offer(chunk[i], first_id + i);
    }
}

double sum_exp(const float* chunk, int64_t padded_count, float shift) {
  Vec sums[4] = {};
  for (int64_t i = 0; i < padded_count; i += kBlock)
    for (int64_t j = 0; j < 4; ++j) {
      // The next chunk travels while this one is computed; an address behind the end is harmless.
      __builtin_prefetch(chunk + kChunk + i + j * kLanes);
      sums[j] += exp_of_negative(load(chunk + i + j * kLanes) - shift);
    }
  const Vec sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  double total = 0;
  for (int64_t i = 0; i < kLanes; ++i) total += sum[i];
  return total;
}

template <typename T>
void to_float(const T* from, int64_t count, float* to) {
  int64_t i = 0;
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, at::Half>)
    for (; i + kLanes <= count; i += kLanes)
      _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
#endif
  for (; i < count; ++i) to[i] = static_cast<float>(from[i]);
}

// One row of logits: its best entries into `ids`, their logits into `values`; returns the log-sum-exp of the row.
template <typename T>
double best_and_log_sum_exp(const T* logits, int64_t vocabulary, int64_t topk, float* values, int64_t* ids) {
  alignas(64) float buffer[kChunk];
  Best best(topk, values, ids);
  double total = 0;
  float shift = kNever;
  for (int64_t begin = 0; begin < vocabulary; begin += kChunk) {
    const int64_t count = std::min(kChunk, vocabulary - begin);
    const int64_t padded = (count + kBlock - 1) / kBlock * kBlock;
    const float* chunk = buffer;
    if (std::is_same_v<T, float> && count == padded) {
      chunk = reinterpret_cast<const float*>(logits + begin);
    } else {
      to_float(logits + begin, count, buffer);
      std::fill(buffer + count, buffer + padded, kNever);
    }
    scan_chunk(chunk, count, begin, best);
    if (best.largest() > shift) {  // the head of the list is the maximum of everything read so far
      total *= std::exp(static_cast<double>(shift) - best.largest());
      shift = best.largest();
    }
    total += sum_exp(chunk, padded, shift == kNever ? 0.0f : shift);
  }
  return shift + std::log(total);
}

std::tuple<at::Tensor, at::Tensor> draft_candidates(const at::Tensor& logits_in, int64_t topk,
                                                    const at::Tensor& horizons_in) {
  const int64_t requests = logits_in.size(0), depth = logits_in.size(1), vocabulary = logits_in.size(2);
  topk = std::min(topk, vocabulary);
  const std::vector<int64_t> shape{requests, depth, topk};
  const at::Tensor token_ids = at::empty(shape, logits_in.options().dtype(at::kLong));
  const at::Tensor log_probs = at::empty(shape, logits_in.options().dtype(at::kFloat));
  if (logits_in.is_meta() || token_ids.numel() == 0) return {token_ids, log_probs};

  const bool is_half = logits_in.scalar_type() == at::kBFloat16 || logits_in.scalar_type() == at::kHalf;
  const at::Tensor logits = (is_half ? logits_in : logits_in.to(at::kFloat)).contiguous();
  const at::Tensor horizons = horizons_in.to(at::kLong).contiguous();
  const int64_t* usable = horizons.const_data_ptr<int64_t>();
  int64_t* ids = token_ids.mutable_data_ptr<int64_t>();
  float* values = log_probs.mutable_data_ptr<float>();

  const auto run_row = [&](int64_t row, const auto* data) {
    float* out = values + row * topk;
    const double log_sum = best_and_log_sum_exp(data + row * vocabulary, vocabulary, topk, out, ids + row * topk);
    for (int64_t k = 0; k < topk; ++k) {
      const double log_prob = std::min(out[k] - log_sum, 0.0);  // NaN where the draft gave no number
      const bool is_usable = row % depth < usable[row / depth] && !std::isnan(out[k] - log_sum);
      out[k] = is_usable ? static_cast<float>(log_prob) : kNever;
    }
  };
  at::parallel_for(0, requests * depth, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (logits.scalar_type() == at::kBFloat16) {
        run_row(row, logits.const_data_ptr<at::BFloat16>());
      } else if (logits.scalar_type() == at::kHalf) {
        run_row(row, logits.const_data_ptr<at::Half>());
      } else {
        run_row(row, logits.const_data_ptr<float>());
      }
    }
  });
  return {token_ids, log_probs};
}

// The rows of one request's tree, one array per field.
struct TreeRows {
  int64_t *tokens, *parents, *depths, *ranks;
  float* scores;
  bool* valid;

  TreeRows from(int64_t row) const {
    return {tokens + row, parents + row, depths + row, ranks + row, scores + row, valid + row};
  }
};

// Best-first with a heap. Its keys order like the reference's: cost (-score, whose bits sort like the number) in the
// upper word, then depth, then the parent, then the rank. Rows enter in that order, so a parent's row may stand for
// its place among the nodes of its depth.
class TreeBuilder {
 public:
  TreeBuilder(const int64_t* tokens, const float* log_probs, int64_t horizon, int64_t parents, int64_t topk,
              int64_t max_rows)
      : tokens_(tokens), log_probs_(log_probs), horizon_(horizon), parents_(parents), topk_(topk),
        max_rows_(max_rows) {
    for (int64_t depth = 0; depth < horizon; ++depth) {
      const float* row = log_probs + depth * parents * topk;
      is_sorted_.push_back(parents == 1 && std::is_sorted(row, row + topk, std::greater<float>()));
    }
  }

  void build(int64_t anchor, const TreeRows& rows) {
    rows.tokens[0] = anchor;
    rows.scores[0] = 0.0f;
    rows.valid[0] = true;
    push_children(0, 0, 0, 0.0f);
    for (int64_t row = 1; row < max_rows_ && !heap_.empty(); ++row) {
      const uint64_t key = heap_.top();
      heap_.pop();
      const int64_t place = key & 0xffffffff, rank = place % topk_;
      const int64_t parent = place / topk_ % (max_rows_ - 1), depth = place / topk_ / (max_rows_ - 1);
      const float cost = cost_of(key);
      rows.tokens[row] = tokens_[depth * topk_ + rank];
      rows.parents[row] = parent;
      rows.depths[row] = depth + 1;
      rows.ranks[row] = rank;
      rows.scores[row] = -cost;
      rows.valid[row] = true;
      if (is_sorted_[depth]) push(depth, parent, 0, rank + 1, -rows.scores[parent]);
      push_children(depth + 1, row, rank, cost);
    }
  }

 private:
  // A node waits for its better sibling only where that one surely comes first.
  void push_children(int64_t depth, int64_t parent, int64_t parent_rank, float parent_cost) {
    if (depth >= horizon_ || parent == max_rows_ - 1) return;  // children of the last row would come after it
    const int64_t last = is_sorted_[depth] ? 1 : topk_;
    for (int64_t rank = 0; rank < last; ++rank) push(depth, parent, parent_rank, rank, parent_cost);
  }

  void push(int64_t depth, int64_t parent, int64_t parent_rank, int64_t rank, float parent_cost) {
    if (rank >= topk_) return;
    const int64_t row = depth * parents_ + (parents_ > 1 ? parent_rank : 0);
    const float cost = parent_cost + -log_probs_[row * topk_ + rank];
    if (!(cost < std::numeric_limits<float>::infinity())) return;
    uint32_t bits;
    std::memcpy(&bits, &cost, sizeof(bits));
    const int64_t place = (depth * (max_rows_ - 1) + parent) * topk_ + rank;
    heap_.push(static_cast<uint64_t>(bits) << 32 | static_cast<uint64_t>(place));
  }

  static float cost_of(uint64_t key) {
    const uint32_t bits = key >> 32;
    float cost;
    std::memcpy(&cost, &bits, sizeof(cost));
    return cost;
  }

  const int64_t* tokens_;
  const float* log_probs_;
  int64_t horizon_, parents_, topk_, max_rows_;
  std::vector<bool> is_sorted_;  // by depth: draft_candidates sorts, a head does not
  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<uint64_t>> heap_;
};

using Tree = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Tree build_tree(const at::Tensor& token_ids_in, const at::Tensor& log_probs_in, const at::Tensor& anchors_in,
                int64_t max_rows) {
  const int64_t requests = token_ids_in.size(0), horizon = token_ids_in.size(1), topk = token_ids_in.size(2);
  const int64_t parents = log_probs_in.size(2);
  TORCH_CHECK_VALUE(horizon * (max_rows - 1) * topk < int64_t{1} << 31, max_rows, " rows over ", horizon, " x ", topk,
                    " candidates cannot be ordered in 32 bits");
  const at::Tensor fields = at::zeros({4, requests, max_rows}, token_ids_in.options().dtype(at::kLong));
  const at::Tensor scores = at::full({requests, max_rows}, kNever, log_probs_in.options().dtype(at::kFloat));
  const at::Tensor valid = at::zeros({requests, max_rows}, token_ids_in.options().dtype(at::kBool));
  const Tree tree{fields.select(0, 0), fields.select(0, 1), fields.select(0, 2), fields.select(0, 3), scores, valid};
  if (token_ids_in.is_meta()) return tree;

  const at::Tensor token_ids = token_ids_in.to(at::kLong).contiguous();
  const at::Tensor log_probs = log_probs_in.to(at::kFloat).contiguous();
  const at::Tensor anchors = anchors_in.to(at::kLong).contiguous();
  const int64_t* tokens = token_ids.const_data_ptr<int64_t>();
  const float* log_prob = log_probs.const_data_ptr<float>();
  const int64_t* anchor = anchors.const_data_ptr<int64_t>();
  int64_t* field = fields.mutable_data_ptr<int64_t>();
  const int64_t size = requests * max_rows;
  const TreeRows all{field, field + size, field + 2 * size, field + 3 * size, scores.mutable_data_ptr<float>(),
                     valid.mutable_data_ptr<bool>()};
  at::parallel_for(0, requests, 8, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t at = r * horizon * topk;
      TreeBuilder(tokens + at, log_prob + at * parents, horizon, parents, topk, max_rows)
          .build(anchor[r], all.from(r * max_rows));
    }
  });
  return tree;
}

at::Tensor path_product(const at::Tensor& conditional_in, const at::Tensor& parents_in, int64_t horizon) {
  const at::Tensor out = at::empty(conditional_in.sizes(), conditional_in.options().dtype(at::kFloat));
  if (conditional_in.is_meta() || out.numel() == 0) return out;
  const at::Tensor conditional = conditional_in.to(at::kFloat).contiguous();
  const at::Tensor parents = parents_in.to(at::kLong).contiguous();
  const int64_t requests = out.size(0), rows = out.size(1);
  std::vector<float> factors(rows), before(rows);
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t* parent = parents.const_data_ptr<int64_t>() + r * rows;
    float* survival = out.mutable_data_ptr<float>() + r * rows;
    std::memcpy(factors.data(), conditional.const_data_ptr<float>() + r * rows, rows * sizeof(float));
    factors[0] = 1.0f;
    for (int64_t i = 0; i < rows; ++i)
      TORCH_CHECK_INDEX(parent[i] >= 0 && parent[i] < rows, "path_product: row ", i, " has parent ", parent[i]);
    std::copy(factors.begin(), factors.end(), survival);
    for (int64_t depth = 1; depth < horizon; ++depth) {
      std::copy(survival, survival + rows, before.begin());
      for (int64_t i = 0; i < rows; ++i) survival[i] = factors[i] * before[parent[i]];
    }
  }
  return out;
}

at::Tensor fill_rows(const at::Tensor& survival_in, const at::Tensor& depths_in, const at::Tensor& valid_in,
                     const at::Tensor& keep_in, int64_t total_rows) {
  const int64_t requests = survival_in.size(0), capacity = survival_in.size(1), size = requests * capacity;
  TORCH_CHECK_VALUE(size < 1 << kFlatBits, requests, " x ", capacity, " rows exceed the ", (1 << kFlatBits) - 1,
                    " that one batch can order");
  const at::Tensor chosen = at::zeros({requests, capacity}, valid_in.options().dtype(at::kBool));
  if (survival_in.is_meta() || size == 0) return chosen;
  const at::Tensor survivals = survival_in.to(at::kFloat).contiguous();
  const at::Tensor depths = depths_in.to(at::kLong).contiguous();
  const at::Tensor valids = valid_in.to(at::kBool).contiguous(), keeps = keep_in.to(at::kBool).contiguous();
  const float* survival = survivals.const_data_ptr<float>();
  const int64_t* depth = depths.const_data_ptr<int64_t>();
  const bool *valid = valids.const_data_ptr<bool>(), *keep = keeps.const_data_ptr<bool>();

  std::vector<uint64_t> keys(size);
  for (int64_t i = 0; i < size; ++i) {
    const uint64_t tier = 3 - valid[i] - (keep[i] && valid[i]) - (i % capacity == 0);
    const float bounded = survival[i] > 0.0f ? std::min(survival[i], 1.0f) : 0.0f;  // NaN and -0 count as 0
    uint32_t bits;
    std::memcpy(&bits, &bounded, sizeof(bits));
    const uint64_t by_survival = (uint64_t{1} << 30) - 1 - bits;
    keys[i] = ((tier << 30 | by_survival) << kDepthBits | static_cast<uint64_t>(depth[i])) << kFlatBits |
              static_cast<uint64_t>(i);
  }
  const auto end = keys.begin() + std::min(total_rows, size);
  std::nth_element(keys.begin(), end, keys.end());
  bool* out = chosen.mutable_data_ptr<bool>();
  for (auto key = keys.begin(); key != end; ++key) {
    const int64_t i = *key & ((1 << kFlatBits) - 1);
    out[i] = valid[i];
  }
  return chosen;
}

using Layout = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                          at::Tensor>;

Layout layout_rows(const at::Tensor& token_ids_in, const at::Tensor& parents_in, const at::Tensor& depths_in,
                   const at::Tensor& keep_in, int64_t capacity, int64_t /* horizon: paths are walked to their end */) {
  const int64_t requests = keep_in.size(0), width = keep_in.size(1);
  const auto longs = token_ids_in.options().dtype(at::kLong), bools = keep_in.options().dtype(at::kBool);
  const at::Tensor fields = at::zeros({5, capacity}, longs);
  const at::Tensor row_offsets = at::zeros({requests + 1}, longs);
  const at::Tensor ancestor_mask = at::zeros({capacity, width}, bools);
  const at::Tensor is_padding = at::zeros({capacity}, bools);
  const Layout layout{fields.select(0, 0), fields.select(0, 1), fields.select(0, 2), fields.select(0, 3),
                      fields.select(0, 4), row_offsets, ancestor_mask, is_padding};
  if (keep_in.is_meta()) return layout;

  const at::Tensor token_ids = token_ids_in.to(at::kLong).contiguous();
  const at::Tensor parents = parents_in.to(at::kLong).contiguous();
  const at::Tensor depths = depths_in.to(at::kLong).contiguous();
  const at::Tensor keeps = keep_in.to(at::kBool).contiguous();
  int64_t* token = fields.mutable_data_ptr<int64_t>();
  int64_t *depth = token + capacity, *request = depth + capacity, *tree_row = request + capacity;
  int64_t *parent = tree_row + capacity, *offset = row_offsets.mutable_data_ptr<int64_t>();
  bool *mask = ancestor_mask.mutable_data_ptr<bool>(), *padding = is_padding.mutable_data_ptr<bool>();

  std::vector<int64_t> flat_row(width);
  int64_t flat = 0;
  for (int64_t r = 0; r < requests; ++r) {
    const bool* keep = keeps.const_data_ptr<bool>() + r * width;
    const int64_t begin = flat;
    for (int64_t i = 0; i < width; ++i) flat_row[i] = keep[i] ? flat++ : -1;
    offset[r + 1] = flat;
    // The reference cannot look at the count and returns rubbish here; on a CPU looking costs nothing.
    TORCH_CHECK_VALUE(flat <= capacity, "layout_rows: more than ", capacity, " rows are kept");
    for (int64_t i = 0; i < width; ++i) {
      if (!keep[i]) continue;
      const int64_t row = flat_row[i], at = r * width + i, up = parents.const_data_ptr<int64_t>()[at];
      TORCH_CHECK_VALUE(up >= 0 && up < width && keep[up], "layout_rows: row ", i, " of request ", r,
                        " is kept without its parent");
      token[row] = token_ids.const_data_ptr<int64_t>()[at];
      depth[row] = depths.const_data_ptr<int64_t>()[at];
      request[row] = r;
      tree_row[row] = i;
      parent[row] = flat_row[up];
    }
    for (int64_t row = begin; row < flat; ++row) {
      bool* ancestors = mask + row * width;
      for (int64_t up = row; !ancestors[up - begin]; up = parent[up]) ancestors[up - begin] = true;
    }
  }
  for (int64_t row = flat; row < capacity; ++row) {
    parent[row] = row;
    if (width > 0) mask[row * width] = true;
    padding[row] = true;
  }
  return layout;
}

at::Tensor matching_child(const at::Tensor& token_ids_in, const at::Tensor& parent_in, const at::Tensor& next_in) {
  const int64_t rows = token_ids_in.size(0);
  const at::Tensor out = at::full({rows}, -1, parent_in.options().dtype(at::kLong));
  if (token_ids_in.is_meta()) return out;
  const at::Tensor token_ids = token_ids_in.to(at::kLong).contiguous();
  const at::Tensor parents = parent_in.to(at::kLong).contiguous();
  const at::Tensor next_tokens = next_in.to(at::kLong).contiguous();
  const int64_t *token = token_ids.const_data_ptr<int64_t>(), *next = next_tokens.const_data_ptr<int64_t>();
  const int64_t* parent = parents.const_data_ptr<int64_t>();
  int64_t* child = out.mutable_data_ptr<int64_t>();
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t up = parent[row];
    TORCH_CHECK_INDEX(up >= 0 && up < rows, "matching_child: row ", row, " has parent ", up);
    if (up != row && token[row] == next[up]) child[up] = row;  // ascending rows: the last one is the largest
  }
  return out;
}

}  // namespace

TORCH_LIBRARY(sgl_kernel_ext_tree, library) {
  library.def("draft_candidates(Tensor logits, int topk, Tensor horizons) -> (Tensor, Tensor)");
  library.def(
      "build_tree(Tensor token_ids, Tensor log_probs, Tensor anchors, int max_rows) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def("path_product(Tensor conditional, Tensor parents, int horizon) -> Tensor");
  library.def("fill_rows(Tensor survival, Tensor depths, Tensor valid, Tensor keep, int total_rows) -> Tensor");
  library.def(
      "layout_rows(Tensor token_ids, Tensor parents, Tensor depths, Tensor keep, int capacity, int horizon) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def("matching_child(Tensor token_ids, Tensor parent, Tensor next_tokens) -> Tensor");
}

#define SGL_KERNEL_EXT_TREE(key)                          \
  TORCH_LIBRARY_IMPL(sgl_kernel_ext_tree, key, library) { \
    library.impl("draft_candidates", &draft_candidates);  \
    library.impl("build_tree", &build_tree);              \
    library.impl("path_product", &path_product);          \
    library.impl("fill_rows", &fill_rows);                \
    library.impl("layout_rows", &layout_rows);            \
    library.impl("matching_child", &matching_child);      \
  }

SGL_KERNEL_EXT_TREE(CPU)
SGL_KERNEL_EXT_TREE(Meta)
