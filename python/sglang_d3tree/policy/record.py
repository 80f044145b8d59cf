"""What earlier rounds say about survival: the part of a decision that must be taken before this round is drafted.

A record is a histogram of survival by depth, in nodes per request, faded as new rounds come in. From it follow the
tokens that a batch of any size can expect from any number of rows and any draft horizon. Pure tensors of fixed shape.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Survival is sorted into quarters of a halving: 1 to 0.84, to 0.71, ... down to 2^-12, below which all are one.
BINS = 48
_PER_HALVING = 4


@dataclass(frozen=True)
class SurvivalRecord:
    """counts [D, BINS] float32, nodes per request by depth and survival, the highest bin first; sums [D, BINS]
    float32, their survival added up."""

    counts: Tensor
    sums: Tensor


def empty_record(horizon: int, device: str | torch.device | None = None) -> SurvivalRecord:
    """No nodes at all."""
    zeros = torch.zeros(horizon, BINS, dtype=torch.float32, device=device)
    return SurvivalRecord(zeros, zeros)


def round_record(survival: Tensor, depths: Tensor, keep: Tensor, horizon: int) -> SurvivalRecord:
    """The nodes of one round, anchors left out: survival [R, N] float32, depths [R, N] int64, keep [R, N] bool."""
    requests = survival.shape[0]
    is_node = keep & (depths > 0)
    value = survival.nan_to_num(0.0).clamp(0.0, 1.0)
    bins = (-_PER_HALVING * value.clamp(min=1e-30).log2()).long().clamp(0, BINS - 1)
    index = ((depths - 1).clamp(0, horizon - 1) * BINS + bins).flatten()
    zeros = survival.new_zeros(horizon * BINS)
    weight = is_node.flatten().float() / requests
    counts = zeros.scatter_add(0, index, weight)
    sums = zeros.scatter_add(0, index, weight * value.flatten())
    return SurvivalRecord(counts.view(horizon, BINS), sums.view(horizon, BINS))


def faded(old: SurvivalRecord, new: SurvivalRecord, share: float, drafted: int) -> SurvivalRecord:
    """The record after one more round, which counts for `share` of it and drafted the first `drafted` depths.

    Depths that were not drafted keep what they had.
    """
    counts, sums = old.counts.clone(), old.sums.clone()
    counts[:drafted].lerp_(new.counts[:drafted], share)
    sums[:drafted].lerp_(new.sums[:drafted], share)
    return SurvivalRecord(counts, sums)


def record_tokens(record: SurvivalRecord, requests: int, totals: Tensor, trust: float = 1.0) -> Tensor:
    """Expected tokens [D, C] float32 of a round with horizon 1 to D and each of totals [C] int64 rows (>= requests).

    requests + trust * (survival of the best totals - requests nodes, taken from the record as if every request were
    its average one). trust corrects survival that does not come true as predicted.
    """
    nodes = record.counts.cumsum(0).cumsum(1) * requests  # [D, BINS] nodes at least that good
    gains = record.sums.cumsum(0).cumsum(1) * requests
    nodes = torch.nn.functional.pad(nodes, (1, 0))
    gains = torch.nn.functional.pad(gains, (1, 0))
    wanted = (totals - requests).to(nodes.dtype).expand(nodes.shape[0], -1).contiguous()
    right = torch.searchsorted(nodes, wanted).clamp(1, BINS)
    low, high = nodes.gather(1, right - 1), nodes.gather(1, right)
    part = ((wanted - low) / (high - low).clamp(min=1e-6)).clamp(0.0, 1.0)
    return requests + trust * torch.lerp(gains.gather(1, right - 1), gains.gather(1, right), part)
