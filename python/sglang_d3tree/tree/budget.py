"""Which rows of the candidate trees go to the verify pass (METHOD 8, order of a round's decisions).

``choose_total`` sizes the pass, ``fill_rows`` chooses who is in it. They are apart because a device cannot wait for
the host: there the total comes from the survival of earlier rounds (``policy.record``), the rows always from this one.
"""

import torch
from torch import Tensor

from sgl_kernel_ext.dispatch import get_kernel
from sglang_d3tree.tree.build import CandidateTree

# Totals to choose from, per doubling: every total is a shape that kernels (or graphs) have to be made for.
TOTALS_PER_DOUBLING = 16
_BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 below 1


def whole_tree(tree: CandidateTree, survival: Tensor, threshold: Tensor | float) -> Tensor:
    """Rows worth verifying if rows were free: keep [R, N] bool, survival >= threshold, the anchor always.

    survival [R, N] float32 as path_product returns it, which makes the result ancestor-closed; threshold is a
    number or a tensor that broadcasts to [R, N].
    """
    is_anchor = torch.arange(survival.shape[1], device=survival.device) == 0
    return tree.valid & ((survival >= threshold) | is_anchor)


def candidate_totals(requests: int, max_rows: int, tile: int, min_rows: int = 1) -> list[int]:
    """Row totals that a batch may take, ascending: `requests` (anchors only), then tile multiples.

    The last one holds max_rows rows of every request. Multiples thin out to TOTALS_PER_DOUBLING per doubling. With
    min_rows > 1 every total is at least requests * min_rows, and anchors only is no choice.
    Raises ValueError unless 1 <= min_rows <= max_rows and requests, tile >= 1.
    """
    if not 1 <= min_rows <= max_rows or requests < 1 or tile < 1:
        raise ValueError(f"no totals for {requests} requests of {min_rows} to {max_rows} rows in tiles of {tile}")
    totals = [requests] if min_rows == 1 else []
    least = max(requests + 1, requests * min_rows)
    step = tile
    total = 0
    while total < requests * max_rows:
        while total >= 2 * TOTALS_PER_DOUBLING * step:
            step *= 2
        total += step
        if total >= least:
            totals.append(total)
    return totals


def floor_first(survival: Tensor, keep: Tensor, min_rows: int) -> Tensor:
    """The ranking [R, N] float32 by which rows compete: survival below 1, and 1 for a request's best min_rows - 1 kept
    nodes.

    With survival as path_product returns it, the rows that are lifted are ancestor-closed, and so is any prefix of
    the ranking. min_rows = 1 returns survival itself: the anchor needs no help.
    """
    if min_rows == 1:
        return survival
    nodes = torch.where(keep, survival.nan_to_num(0.0), -1.0)
    nodes[:, 0] = 2.0
    # Stable: equal survival goes to the smaller row, and parents come before children.
    order = nodes.sort(dim=1, descending=True, stable=True).indices[:, :min_rows]
    lifted = torch.zeros_like(keep).scatter_(1, order, True) & keep
    # A head may be certain of a node; even that gives way to the floor.
    return torch.where(lifted, 1.0, survival.clamp(max=_BELOW_ONE))


def expected_tokens(
    survival: Tensor, valid: Tensor, keep: Tensor, totals: Tensor, ranking: Tensor | None = None
) -> Tensor:
    """Tokens a round is expected to emit with each of totals [C] int64 rows in all -> [C] float32 (METHOD 8).

    R, one bonus token a request, plus the survival of the nodes that fill_rows would choose. survival [R, N]
    float32, valid and keep [R, N] bool, ranking [R, N] where rows compete by something else than survival. Totals
    beyond the first that holds every kept row are worth nothing (-inf): dropped nodes fill a tile, they do not open
    one. Each total is at least R.
    """
    requests = survival.shape[0]
    survival = survival.nan_to_num(0.0)
    ranking = survival if ranking is None else ranking.nan_to_num(0.0)
    is_node = valid.clone()
    is_node[:, 0] = False
    key = torch.where(is_node, ranking + 2.0 * keep, -1.0).flatten()
    order = key.argsort(descending=True)
    gains = (survival * is_node).flatten()[order]
    sums = torch.nn.functional.pad(gains.double().cumsum(0), (1, 0))
    tokens = requests + sums[(totals - requests).clamp(max=gains.shape[0])]
    whole = keep.sum()
    opens = torch.nn.functional.pad(totals[:-1], (1, 0), value=-1) < whole
    return torch.where(opens, tokens, -torch.inf).float()


def choose_total(tokens: Tensor, seconds: Tensor) -> Tensor:
    """Index [] int64 of the total with the most expected tokens per second (METHOD 8); the smallest of equals.

    tokens [C], -inf where a total is no choice, and seconds [C] > 0 of a whole round.
    """
    return (tokens / seconds).argmax()


def fill_rows(tree: CandidateTree, ranking: Tensor, keep: Tensor, total_rows: int) -> Tensor:
    """Bring the whole batch to total_rows rows, anchors included: keep [R, N] bool, ancestor-closed if keep was.

    More kept rows than that: the best kept nodes of the batch stay, by ranking [R, N], which is survival or what
    floor_first makes of it. Fewer: the best dropped nodes come back, as far as there are any. Equal ranking is
    settled by smaller depth, then request, then row. An anchor is never dropped. One selection over R * N keys on
    the device, no host value needed. Raises ValueError for total_rows < R.
    """
    requests = ranking.shape[0]
    if total_rows < requests:
        raise ValueError(f"{total_rows} rows cannot hold the anchors of {requests} requests")
    kernel = get_kernel("fill_rows", ranking.device.type)
    return kernel(ranking, tree.depths, tree.valid, keep, total_rows)
