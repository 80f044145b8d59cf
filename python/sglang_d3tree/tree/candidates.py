"""Draft logits -> the best tokens per depth. Letters in shapes: R requests, D horizon, K candidates, V vocabulary."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kernel_ext.dispatch import get_kernel


@dataclass(frozen=True)
class Candidates:
    """Top tokens of the draft's marginal at every depth, best first.

    token_ids [R, D, K] int64; log_probs [R, D, K] float32, a log-softmax over the whole vocabulary (not renormalised
    over K), -inf at depths beyond the request's horizon; horizons [R] int64, usable depths per request, <= D.
    Index 0 of the depth axis is the first token after the anchor.
    """

    token_ids: Tensor
    log_probs: Tensor
    horizons: Tensor


def draft_candidates(
    logits: Tensor, topk: int, horizons: Tensor | None = None, token_map: Tensor | None = None
) -> Candidates:
    """Candidates of a drafted block, from logits [R, D, V] of any float dtype (METHOD 2).

    topk is capped at V; horizons [R] int64 defaults to D for every request. Equal logits are ordered by token id.
    token_map [V] int64 ascending: the token of every logit, where the draft knows a part of the vocabulary only
    (METHOD 5b); the log-softmax is then over that part. Raises ValueError for logits that are not three-dimensional
    or topk < 1.
    """
    if logits.dim() != 3 or topk < 1:
        raise ValueError(f"need logits [R, D, V] and topk >= 1, got {tuple(logits.shape)} and {topk}")
    if horizons is None:
        horizons = torch.full((logits.shape[0],), logits.shape[1], dtype=torch.int64, device=logits.device)
    token_ids, log_probs = get_kernel("draft_candidates", logits.device.type)(logits, topk, horizons)
    if token_map is not None:
        token_ids = token_map[token_ids]
    return Candidates(token_ids, log_probs, horizons)
