"""What the rounds did, counted on the device and read only when somebody asks."""

from __future__ import annotations

import torch

from sglang_d3tree.tree.accept import Walk
from sglang_d3tree.tree.layout import VerifyRows


class RoundCounters:
    """Sums over all rounds since start-up; reading them is the only host round trip."""

    def __init__(self) -> None:
        self._rounds = 0
        self._request_rounds = 0
        self._capacity = 0
        # rows verified (anchors included), tokens emitted, tokens that survival predicted
        self._sums: torch.Tensor | None = None

    def record(self, rows: VerifyRows, walk: Walk, predicted: torch.Tensor) -> None:
        """Add one round; predicted [] is the survival of all verified rows, anchors (1 each) included.

        A request emits one token and as many as nodes are accepted, so that sum is what survival says will be emitted.
        """
        self._rounds += 1
        self._request_rounds += rows.num_requests
        self._capacity += rows.token_ids.shape[0]
        round_sums = torch.stack((rows.row_offsets[-1], walk.accept_lens.sum(), predicted.double()))
        self._sums = round_sums if self._sums is None else self._sums + round_sums

    def summary(self) -> dict[str, float]:
        """Averages: accept lengths and rows are per request and round, fill is used rows over row capacity."""
        if self._sums is None:
            return {"rounds": 0}
        verified, emitted, predicted = self._sums.tolist()
        return {
            "rounds": self._rounds,
            "accept_length": emitted / self._request_rounds,
            "predicted_accept_length": predicted / self._request_rounds,
            "rows_per_request": verified / self._request_rounds,
            "rows_per_round": verified / self._rounds,
            "row_fill": verified / self._capacity,
        }
