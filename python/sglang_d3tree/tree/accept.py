"""Target tokens -> the accepted path, one step at a time (METHOD 6).

A round walks from every anchor: at the row reached so far the target's own choice of next token (its argmax, or a
sample from its distribution) is emitted; a kept child that carries this token is the next row, otherwise the token
is the bonus and the request is done. Precondition: siblings carry different tokens, which holds because they are
distinct top candidates of one distribution.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kernel_ext.dispatch import get_kernel
from sglang_d3tree.tree.layout import VerifyRows


@dataclass(frozen=True)
class Walk:
    """Where every request's walk stands.

    row [R] int64, the verify row reached; alive [R] bool; accept_lens [R] int64, tokens emitted so far, bonus
    included; token_ids [R, D + 1] int64, the emitted tokens, 0 beyond accept_lens; path_rows [R, D + 1] int64, the
    verify rows whose KV is committed: the anchor, then the accepted nodes, the last one repeated to the end. Of a
    finished walk, the first accept_lens entries of path_rows are exactly the rows to commit.
    """

    row: Tensor
    alive: Tensor
    accept_lens: Tensor
    token_ids: Tensor
    path_rows: Tensor

    @property
    def horizon(self) -> int:
        return self.token_ids.shape[1] - 1


def start_walk(rows: VerifyRows, horizon: int) -> Walk:
    """Every request at its anchor, nothing emitted; horizon is the greatest number of nodes a walk can accept."""
    anchor = rows.row_offsets[:-1]
    path_rows = anchor[:, None].repeat(1, horizon + 1)
    return Walk(
        row=anchor,
        alive=torch.ones_like(anchor, dtype=torch.bool),
        accept_lens=torch.zeros_like(anchor),
        token_ids=torch.zeros_like(path_rows),
        path_rows=path_rows,
    )


def advance(rows: VerifyRows, walk: Walk, next_tokens: Tensor, step: int) -> Walk:
    """Emit next_tokens [R] int64 for the living requests and move on; step counts from 0 to walk.horizon.

    next_tokens[r] is what the target says after walk.row[r]; it is ignored for requests that are done. The step
    walk.horizon emits the last possible token and ends every walk. Raises ValueError for a step outside that range.
    """
    child = _matching_child(rows, next_tokens[rows.request])
    return _step(walk, child[walk.row], next_tokens, step)


def accept_greedy(rows: VerifyRows, target_tokens: Tensor, horizon: int) -> Walk:
    """The finished walk when target_tokens [T] int64 holds the target's next token after every verify row."""
    child = _matching_child(rows, target_tokens)
    walk = start_walk(rows, horizon)
    for step in range(horizon + 1):
        walk = _step(walk, child[walk.row], target_tokens[walk.row], step)
    return walk


def _matching_child(rows: VerifyRows, next_tokens: Tensor) -> Tensor:
    kernel = get_kernel("matching_child", next_tokens.device.type)
    return kernel(rows.token_ids, rows.parent, next_tokens)


def _step(walk: Walk, child: Tensor, next_tokens: Tensor, step: int) -> Walk:
    """One step of every walk, child [R] being the row to move to, or -1."""
    if not 0 <= step <= walk.horizon:
        raise ValueError(f"step {step} is outside the walk's steps 0..{walk.horizon}")
    if step == walk.horizon:
        child = torch.full_like(child, -1)
    moved = walk.alive & (child >= 0)
    row = torch.where(moved, child, walk.row)
    token_ids = walk.token_ids.clone()
    token_ids[:, step] = next_tokens * walk.alive
    path_rows = walk.path_rows.clone()
    path_rows[:, step + 1 :] = row[:, None]  # a walk that is done stays on its last committed row
    return Walk(row, moved, walk.accept_lens + walk.alive, token_ids, path_rows)
