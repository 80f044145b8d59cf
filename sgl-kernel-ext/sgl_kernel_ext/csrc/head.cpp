// The tree-size head on CPU. The specification, shapes included, is reference/head.py; sums are taken in another order.
// It also runs on meta tensors, where it returns the shapes, so that a round can be traced without data.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "vec.h"

namespace {

using namespace sgl_kernel_ext;

constexpr float kNever = -std::numeric_limits<float>::infinity();  // log-probability of the impossible

// One depth of one request: its candidates, and what they are worth below each parent.
class Depth {
 public:
  Depth(int64_t topk, int64_t rank)
      : topk_(topk), rank_((rank + kLanes - 1) / kLanes * kLanes), lanes_((topk + kLanes - 1) / kLanes * kLanes),
        own_(lanes_, kNever), logits_(lanes_), query_(rank_, 0.0f), left_(rank_, 0.0f), children_(topk * rank_, 0.0f) {}

  void set_candidates(const int64_t* ids, const float* log_probs, const float* state, const float* tokens, float weight,
                      const float* children, int64_t rank) {
    for (int64_t k = 0; k < topk_; ++k) {
      own_[k] = log_probs[k] > kNever ? state[0] + tokens[ids[k]] + weight * log_probs[k] : kNever;
      std::copy_n(children + ids[k] * rank, rank, children_.begin() + k * rank_);
    }
    std::copy_n(state + 1, rank, query_.begin());
  }

  void score(const float* parent, int64_t rank, bool exclusive, float* out) {
    for (int64_t i = 0; i < rank; ++i) left_[i] = parent[i] + query_[i];
    for (int64_t k = 0; k < topk_; ++k) {
      Vec sum = {};
      for (int64_t i = 0; i < rank_; i += kLanes) sum += load(&left_[i]) * load(&children_[k * rank_ + i]);
      logits_[k] = own_[k] > kNever ? own_[k] + sum_of(sum) : own_[k];
    }
    const float log_sum = exclusive ? log_sum_with_none() : 0.0f;
    for (int64_t k = 0; k < topk_; ++k) {
      const float z = logits_[k];
      const float chance = exclusive ? z - log_sum : std::min(z, 0.0f) - std::log1p(std::exp(-std::abs(z)));
      out[k] = std::isnan(chance) || std::isnan(z) ? kNever : std::min(chance, 0.0f);
    }
  }

 private:
  float log_sum_with_none() {
    float top = 0.0f;  // the logit of "none of them"
    for (int64_t k = 0; k < topk_; ++k) top = std::max(top, logits_[k]);
    std::fill(logits_.begin() + topk_, logits_.end(), kNever);
    Vec sum = {};
    for (int64_t k = 0; k < lanes_; k += kLanes) sum += exp_of_negative(load(&logits_[k]) - top);
    return top + std::log(sum_of(sum) + std::exp(-top));
  }

  int64_t topk_, rank_, lanes_;  // rank_ and lanes_ padded to whole vectors
  std::vector<float> own_, logits_, query_, left_, children_;
};

at::Tensor path_edges(const at::Tensor& token_ids_in, const at::Tensor& log_probs_in, const at::Tensor& anchors_in,
                      const at::Tensor& states_in, const at::Tensor& tokens_in, const at::Tensor& log_prob_weight,
                      const at::Tensor& parents_in, const at::Tensor& children_in, bool exclusive) {
  const int64_t requests = token_ids_in.size(0), horizon = token_ids_in.size(1), topk = token_ids_in.size(2);
  const int64_t vocabulary = parents_in.size(0), rank = parents_in.size(1);
  const at::Tensor out =
      at::full({requests, horizon, topk, topk}, kNever, log_probs_in.options().dtype(at::kFloat));
  if (token_ids_in.is_meta() || out.numel() == 0) return out;

  const at::Tensor token_ids = token_ids_in.to(at::kLong).contiguous();
  const at::Tensor log_probs = log_probs_in.to(at::kFloat).contiguous();
  const at::Tensor anchors = anchors_in.to(at::kLong).contiguous();
  const at::Tensor states = states_in.to(at::kFloat).contiguous();
  const at::Tensor tokens = tokens_in.to(at::kFloat).contiguous();
  const at::Tensor parents = parents_in.to(at::kFloat).contiguous();
  const at::Tensor children = children_in.to(at::kFloat).contiguous();
  const int64_t* ids = token_ids.const_data_ptr<int64_t>();
  const int64_t* anchor = anchors.const_data_ptr<int64_t>();
  const float* parent_rows = parents.const_data_ptr<float>();
  const float weight = log_prob_weight.item<float>();
  const auto in_vocabulary = [&](int64_t id) { return id >= 0 && id < vocabulary; };
  TORCH_CHECK_INDEX(std::all_of(ids, ids + token_ids.numel(), in_vocabulary) &&
                        std::all_of(anchor, anchor + requests, in_vocabulary),
                    "path_edges: a token outside the vocabulary of ", vocabulary);

  at::parallel_for(0, requests, 4, [&](int64_t begin, int64_t end) {
    Depth depth(topk, rank);
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t d = 0; d < horizon; ++d) {
        const int64_t row = r * horizon + d;
        depth.set_candidates(ids + row * topk, log_probs.const_data_ptr<float>() + row * topk,
                             states.const_data_ptr<float>() + row * (1 + rank), tokens.const_data_ptr<float>(), weight,
                             children.const_data_ptr<float>(), rank);
        const int64_t* parent = d == 0 ? anchor + r : ids + (row - 1) * topk;
        for (int64_t p = 0; p < (d == 0 ? 1 : topk); ++p)
          depth.score(parent_rows + parent[p] * rank, rank, exclusive,
                      out.mutable_data_ptr<float>() + (row * topk + p) * topk);
      }
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY(sgl_kernel_ext_head, library) {
  library.def(
      "path_edges(Tensor token_ids, Tensor log_probs, Tensor anchors, Tensor states, Tensor tokens, "
      "Tensor log_prob_weight, Tensor parents, Tensor children, bool exclusive) -> Tensor");
}

TORCH_LIBRARY_IMPL(sgl_kernel_ext_head, CPU, library) { library.impl("path_edges", &path_edges); }
TORCH_LIBRARY_IMPL(sgl_kernel_ext_head, Meta, library) { library.impl("path_edges", &path_edges); }
