"""The KV slots of one round, and which of them its rows use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_d3tree.runtime.slots import slot_window
from sglang_d3tree.tree.accept import Walk
from sglang_d3tree.tree.layout import VerifyRows


@dataclass(frozen=True)
class RoundWindow:
    """The slots behind every request's prefix that a round may write.

    prefix_lens [R] int64, committed tokens; slots [R, W] int64, allocator slots of the W positions from
    ``prefix_lens`` on; plan, SGLang's ``KVLocPlan`` over the flattened slots.
    """

    prefix_lens: torch.Tensor
    slots: torch.Tensor
    plan: Any

    @property
    def num_requests(self) -> int:
        return self.slots.shape[0]

    @property
    def width(self) -> int:
        return self.slots.shape[1]


def open_window(batch: Any, runner: Any, width: int) -> RoundWindow:
    """Read the slots that the scheduler reserved for this round from the target's request-to-token table."""
    slots = slot_window(runner.req_to_token_pool.req_to_token, batch.req_pool_indices, batch.seq_lens, width)
    plan = runner.kv_index_translator.plan(
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens,
        # With overlap scheduling the host may know only what was reserved.
        seq_lens_cpu=batch.spec_info.nxt_kv_lens_cpu if batch.seq_lens_cpu is None else batch.seq_lens_cpu,
        write_virtual=slots.flatten(),
        read_extent=width,
    )
    return RoundWindow(batch.seq_lens, slots, plan)


def local_rows(rows: VerifyRows, flat: torch.Tensor, request: torch.Tensor) -> torch.Tensor:
    """Index of a verify row among its own request's rows; any shape, int64."""
    return flat - rows.row_offsets[request]


def write_columns(rows: VerifyRows, width: int) -> torch.Tensor:
    """Where each verify row's KV goes, as indices into the flattened window [T] int64; -1 sends padding to the sink."""
    index = torch.arange(rows.request.shape[0], device=rows.request.device)
    columns = rows.request * width + local_rows(rows, index, rows.request)
    return torch.where(rows.is_padding, -1, columns)


def committed_moves(window: RoundWindow, rows: VerifyRows, walk: Walk) -> tuple[torch.Tensor, torch.Tensor]:
    """KV moves that leave the accepted path in consecutive positions: indices into the flattened window.

    Returns:
        target, source [R * (D + 1)] int64. Entries beyond a request's accept length move a slot onto itself.
    """
    steps = torch.arange(walk.path_rows.shape[1], device=walk.path_rows.device).expand_as(walk.path_rows)
    request = torch.arange(window.num_requests, device=steps.device).unsqueeze(1)
    source = local_rows(rows, walk.path_rows, request)
    committed = steps < walk.accept_lens.unsqueeze(1)
    target = torch.where(committed, steps, source)
    # Two entries of one scatter must not name the same target with different sources: the tail repeats the last
    # committed row, whose own slot may be another entry's target, so it is pointed at the anchor, which stays put.
    target = torch.where(committed, target, 0)
    source = torch.where(committed, source, 0)
    base = request * window.width
    return (base + target).flatten(), (base + source).flatten()
