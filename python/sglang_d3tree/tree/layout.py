"""Kept rows of all trees -> the flat rows of one verify pass."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kernel_ext.dispatch import get_kernel
from sglang_d3tree.tree.build import CandidateTree


@dataclass(frozen=True)
class VerifyRows:
    """T rows for the target: the requests one after the other, each anchor first, then padding.

    token_ids, depths [T] int64; request [T] int64 (0 at padding); tree_row [T] int64, the row in the candidate tree
    (0 at padding); parent [T] int64, the parent's index in 0..T-1 (its own at anchors and padding); row_offsets
    [R + 1] int64: request r owns the rows row_offsets[r] to row_offsets[r + 1], in tree order; ancestor_mask [T, N]
    bool: row t may attend to the j-th kept row of its own request, itself included (padding: column 0 only);
    is_padding [T] bool, true from row_offsets[R] on.
    """

    token_ids: Tensor
    depths: Tensor
    request: Tensor
    tree_row: Tensor
    parent: Tensor
    row_offsets: Tensor
    ancestor_mask: Tensor
    is_padding: Tensor

    @property
    def num_requests(self) -> int:
        return self.row_offsets.shape[0] - 1


def layout_rows(tree: CandidateTree, keep: Tensor, capacity: int) -> VerifyRows:
    """Compact the kept rows into `capacity` = T verify rows.

    keep [R, N] bool must be ancestor-closed, hold every anchor and at most `capacity` rows (fill_rows sees to it).
    More rows cannot be noticed without waiting for the device: the surplus is cut off and the result is unusable.
    Raises ValueError for capacity < R.
    """
    requests = keep.shape[0]
    if capacity < requests:
        raise ValueError(f"{capacity} rows cannot hold the anchors of {requests} requests")
    kernel = get_kernel("layout_rows", keep.device.type)
    return VerifyRows(*kernel(tree.token_ids, tree.parents, tree.depths, keep, capacity, tree.horizon))


def anchor_rows(anchors: Tensor, width: int) -> VerifyRows:
    """The rows of a round without a draft: every request's anchor [R] int64 and nothing else.

    The ancestor mask has `width` columns, as many as a request may have rows in other rounds.
    """
    requests = anchors.shape[0]
    rows = torch.arange(requests, device=anchors.device)
    zeros = torch.zeros_like(rows)
    return VerifyRows(
        token_ids=anchors,
        depths=zeros,
        request=rows,
        tree_row=zeros,
        parent=rows,
        row_offsets=torch.arange(requests + 1, device=anchors.device),
        ancestor_mask=(torch.arange(width, device=anchors.device) == 0).expand(requests, width).contiguous(),
        is_padding=torch.zeros(requests, dtype=torch.bool, device=anchors.device),
    )
