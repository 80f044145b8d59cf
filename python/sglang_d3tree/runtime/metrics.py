"""What the rounds did, counted on the device and read only when somebody asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sglang_d3tree.policy.planner import MODES
from sglang_d3tree.runtime.stopwatch import STAGES, Stopwatch
from sglang_d3tree.tree.accept import Walk
from sglang_d3tree.tree.layout import VerifyRows


class RoundCounters:
    """Sums over all rounds since start-up; reading them is the only host round trip."""

    def __init__(self) -> None:
        self._host: dict[str, float] = dict.fromkeys(
            ("rounds", "request_rounds", "capacity", "drafted", "seconds", "predicted", "seconds_predicted", "error"), 0
        )
        self._host |= {f"mode_{mode}": 0 for mode in MODES} | {f"stage_{stage}": 0.0 for stage in STAGES}
        # rows verified (anchors included), tokens emitted, tokens that survival predicted
        self._device: torch.Tensor | None = None

    def record(
        self,
        rows: VerifyRows,
        walk: Walk,
        survival: torch.Tensor,
        mode: str,
        horizon: int,
        predicted: float,
        watch: Stopwatch,
    ) -> None:
        """Add one round: its mode, its drafted positions, the seconds it should have taken (0: unknown) and did.

        survival [] is that of all verified rows, anchors (1 each) included: a request emits one token and as many as
        nodes are accepted, so that sum is what survival says will be emitted.
        """
        host = self._host
        host["rounds"] += 1
        host["request_rounds"] += rows.num_requests
        host["capacity"] += rows.token_ids.shape[0]
        host["drafted"] += horizon
        host["seconds"] += watch.total
        host[f"mode_{mode}"] += 1
        for stage, seconds in watch.seconds.items():
            host[f"stage_{stage}"] += seconds
        if predicted > 0.0:
            host["predicted"] += predicted
            host["seconds_predicted"] += watch.total
            host["error"] += abs(predicted - watch.total)
        round_sums = torch.stack((rows.row_offsets[-1], walk.accept_lens.sum(), survival.double()))
        self._device = round_sums if self._device is None else self._device + round_sums

    def totals(self) -> dict[str, float]:
        """The plain sums; differences of two readings describe what happened between them (``averages``)."""
        verified, emitted, expected = (0, 0, 0.0) if self._device is None else self._device.tolist()
        return {**self._host, "rows": verified, "tokens": emitted, "tokens_predicted": expected}

    def summary(self) -> dict[str, Any]:
        """Averages since start-up, and the sums they come from."""
        totals = self.totals()
        return {**averages(totals), "totals": totals}


def averages(totals: Mapping[str, float]) -> dict[str, Any]:
    """What a stretch of rounds was like on average, from their sums.

    accept_length, what survival predicted of it, and rows_per_request are per request and round; row_fill is used rows
    over rows computed; modes counts rounds; horizon is drafted positions per round, plain rounds with 0; round_seconds
    and stage_seconds are per round;
    predicted_over_measured compares sums, prediction_error is the mean distance over the mean round; budget_share is
    the budget's part of all round time.
    """
    rounds = totals["rounds"]
    if not rounds:
        return {"rounds": 0}
    averages: dict[str, Any] = {
        "rounds": rounds,
        "accept_length": totals["tokens"] / totals["request_rounds"],
        "predicted_accept_length": totals["tokens_predicted"] / totals["request_rounds"],
        "rows_per_request": totals["rows"] / totals["request_rounds"],
        "rows_per_round": totals["rows"] / rounds,
        "requests_per_round": totals["request_rounds"] / rounds,
        "row_fill": totals["rows"] / totals["capacity"],
        "modes": {mode: totals[f"mode_{mode}"] for mode in MODES},
        "horizon": totals["drafted"] / rounds,
        "round_seconds": totals["seconds"] / rounds,
        "stage_seconds": {stage: totals[f"stage_{stage}"] / rounds for stage in STAGES},
        "budget_share": totals["stage_budget"] / max(totals["seconds"], 1e-9),
    }
    if totals["seconds_predicted"]:
        averages["predicted_over_measured"] = totals["predicted"] / totals["seconds_predicted"]
        averages["prediction_error"] = totals["error"] / totals["seconds_predicted"]
    return averages
