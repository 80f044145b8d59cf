"""What the rounds did, counted on the device and read only when somebody asks."""

from __future__ import annotations

from typing import Any

import torch

from sglang_d3tree.policy.planner import MODES
from sglang_d3tree.runtime.stopwatch import STAGES, Stopwatch
from sglang_d3tree.tree.accept import Walk
from sglang_d3tree.tree.layout import VerifyRows


class RoundCounters:
    """Sums over all rounds since start-up; reading them is the only host round trip."""

    def __init__(self) -> None:
        self._rounds = 0
        self._request_rounds = 0
        self._capacity = 0
        # rows verified (anchors included), tokens emitted
        self._sums: torch.Tensor | None = None
        self._modes = dict.fromkeys(MODES, 0)
        self._drafted = 0
        self._stages = dict.fromkeys(STAGES, 0.0)
        self._measured = 0.0
        # Only rounds whose time was predicted count in these three.
        self._predicted = 0.0
        self._measured_of_predicted = 0.0
        self._error = 0.0

    def record(self, rows: VerifyRows, walk: Walk, mode: str, horizon: int, predicted: float, watch: Stopwatch) -> None:
        """Add one round: its mode, its drafted positions, the seconds it should have taken and those it did."""
        self._rounds += 1
        self._request_rounds += rows.num_requests
        self._capacity += rows.token_ids.shape[0]
        round_sums = torch.stack((rows.row_offsets[-1], walk.accept_lens.sum()))
        self._sums = round_sums if self._sums is None else self._sums + round_sums
        self._modes[mode] += 1
        self._drafted += horizon
        for stage, seconds in watch.seconds.items():
            self._stages[stage] += seconds
        self._measured += watch.total
        if predicted > 0.0:
            self._predicted += predicted
            self._measured_of_predicted += watch.total
            self._error += abs(predicted - watch.total)

    def summary(self) -> dict[str, Any]:
        """Averages since start-up.

        accept_length and rows_per_request are per request and round; row_fill is used rows over rows computed; modes
        counts rounds; horizon is drafted positions per round, plain rounds with 0; seconds are per round and stage;
        predicted_over_measured compares sums, prediction_error is the mean distance over the mean round; budget_share
        is the budget's part of all round time.
        """
        if self._sums is None:
            return {"rounds": 0}
        verified, emitted = self._sums.tolist()
        summary: dict[str, Any] = {
            "rounds": self._rounds,
            "accept_length": emitted / self._request_rounds,
            "rows_per_request": verified / self._request_rounds,
            "rows_per_round": verified / self._rounds,
            "requests_per_round": self._request_rounds / self._rounds,
            "row_fill": verified / self._capacity,
            "modes": dict(self._modes),
            "horizon": self._drafted / self._rounds,
            "round_seconds": self._measured / self._rounds,
            "stage_seconds": {stage: seconds / self._rounds for stage, seconds in self._stages.items()},
            "budget_share": self._stages["budget"] / max(self._measured, 1e-9),
        }
        if self._predicted > 0.0:
            summary["predicted_over_measured"] = self._predicted / self._measured_of_predicted
            summary["prediction_error"] = self._error / self._measured_of_predicted
        return summary
