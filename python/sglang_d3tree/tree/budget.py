"""Which rows of the candidate trees go to the verify pass (METHOD 8, order of a round's decisions)."""

import torch
from torch import Tensor

from sgl_kernel_ext.dispatch import get_kernel
from sglang_d3tree.tree.build import CandidateTree


def whole_tree(tree: CandidateTree, survival: Tensor, threshold: Tensor | float) -> Tensor:
    """Rows worth verifying if rows were free: keep [R, N] bool, survival >= threshold, the anchor always.

    survival [R, N] float32 as path_product returns it, which makes the result ancestor-closed; threshold is a
    number or a tensor that broadcasts to [R, N].
    """
    is_anchor = torch.arange(survival.shape[1], device=survival.device) == 0
    return tree.valid & ((survival >= threshold) | is_anchor)


def fill_rows(tree: CandidateTree, survival: Tensor, keep: Tensor, total_rows: int) -> Tensor:
    """Bring the whole batch to total_rows rows, anchors included: keep [R, N] bool, ancestor-closed if keep was.

    More kept rows than that: the best kept nodes of the batch stay, by survival [R, N]. Fewer: the best dropped
    nodes come back, as far as there are any. Equal survival is settled by smaller depth, then request, then row.
    An anchor is never dropped. One selection over R * N keys on the device, no host value needed.
    Raises ValueError for total_rows < R.
    """
    requests = survival.shape[0]
    if total_rows < requests:
        raise ValueError(f"{total_rows} rows cannot hold the anchors of {requests} requests")
    kernel = get_kernel("fill_rows", survival.device.type)
    return kernel(survival, tree.depths, tree.valid, keep, total_rows)
