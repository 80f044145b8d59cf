"""The tree-size head in plain torch: the specification of its faster kernels.

Letters in shapes: R requests, D draft horizon, K candidates per depth, V vocabulary, r rank of the path term.
"""

import torch
from torch import Tensor
from torch.nn import functional


def log_chance(logits: Tensor, exclusive: bool) -> Tensor:
    """Logits [..., K] -> log conditional survival [..., K], at most 0; -inf stays -inf and NaN becomes -inf.

    Each on its own a log-sigmoid; exclusive, a log-softmax over the K of them and "none", whose logit is 0.
    """
    if exclusive:
        none = logits.new_zeros(*logits.shape[:-1], 1)
        chance = logits - torch.cat((logits, none), -1).logsumexp(-1, keepdim=True)
    else:
        chance = functional.logsigmoid(logits)
    chance = chance.clamp(max=0.0)
    return chance.where(chance <= 0, -torch.inf)


def path_edges(
    token_ids: Tensor,
    log_probs: Tensor,
    anchors: Tensor,
    states: Tensor,
    tokens: Tensor,
    log_prob_weight: Tensor,
    parents: Tensor,
    children: Tensor,
    exclusive: bool,
) -> Tensor:
    """Log conditional survival of every candidate below every candidate of the depth before (METHOD 3b).

    token_ids [R, D, K] int64, log_probs [R, D, K] float32 (-inf: no candidate), anchors [R] int64, states
    [R, D, 1 + r] float32 (the state's share of the logit, then its query), tokens [V], log_prob_weight [], parents
    and children [V, r] float32 -> [R, D, K, K] float32, parent before child. At the first depth the anchor is parent
    0 and the other rows are -inf.
    """
    _, depth, topk = token_ids.shape
    own = states[..., :1] + tokens[token_ids] + log_prob_weight * log_probs
    parent_ids = torch.cat((anchors.view(-1, 1, 1).expand(-1, min(depth, 1), topk), token_ids[:, :-1]), 1)
    left = parents[parent_ids] + states[:, :, None, 1:]
    logits = own.unsqueeze(2) + left @ children[token_ids].transpose(-1, -2)
    # A candidate that the draft calls impossible may not take its siblings' chances, whatever the weights' signs.
    logits = logits.where((log_probs > -torch.inf).unsqueeze(2), -torch.inf)
    chance = log_chance(logits, exclusive)
    chance[:, :1, 1:] = -torch.inf
    return chance
