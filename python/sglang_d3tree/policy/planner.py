"""What each round does: draft how far or not at all, and verify how many rows (METHOD 8 and 5).

The host's part of the budget. A round asks twice: ``horizon`` before it drafts, from costs and the record of earlier
rounds; ``total`` when its candidate trees are there. It then tells what came of it (``observe``). Everything follows
from costs and tokens, never from a clock, so all ranks of a tensor-parallel server decide alike.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_d3tree.policy.cost import CostTables
from sglang_d3tree.policy.record import empty_record, faded, record_tokens, round_record
from sglang_d3tree.tree.budget import candidate_totals, choose_total, expected_tokens, fill_rows, floor_first
from sglang_d3tree.tree.build import CandidateTree

PLAIN, LIGHT, HEAVY, SATURATED = "plain", "light", "heavy", "saturated"
MODES = (PLAIN, LIGHT, HEAVY, SATURATED)

# A change of horizon, plain decoding included, must promise this much more speed: differences below it are within
# the error of the costs, and following them would flap.
MARGIN = 0.03
# Plain rounds between two drafted ones that only find out whether drafting pays again. A probe that would have been
# slower doubles the distance (it costs about half a plain round, at the largest distance a thousandth of the time), one
# that would have been faster is soon followed by another.
SOON_PROBE, FIRST_PROBE, LAST_PROBE = 8, 32, 512
# Request-rounds after which what was seen counts half, and drafted ones before which every round is drafted: a
# decision from one round would follow its luck. For the same reason a probe stands for at most some of the rounds
# that went by without one.
HALF_LIFE = 64.0
WARM_UP = 16
_PROBE_STANDS_FOR = 8
# How far measured acceptance may correct predicted survival.
TRUST_LIMITS = (0.05, 2.0)
# Nodes that are taken to have come true as predicted before any was seen.
_TRUST_PRIOR = 8.0


@dataclass(frozen=True)
class Rows:
    """The rows of a round: keep [R, N] bool, their host-known number, the mode, and the seconds it should take."""

    keep: Tensor
    total: int
    mode: str
    seconds: float


class Planner:
    """Decisions of one server, with what it remembers between rounds.

    costs: None where nothing is measured; then every round drafts as far as it may and verifies all that its policy
    wants. horizon: drafted positions at most. adaptive_horizon: may draft fewer of them; plain_mode: may draft none.
    """

    def __init__(
        self,
        costs: CostTables | None,
        horizon: int,
        max_rows: int,
        *,
        min_rows: int = 1,
        adaptive_horizon: bool = True,
        plain_mode: bool = True,
        device: str | torch.device = "cpu",
    ) -> None:
        self.costs = costs
        self.max_horizon = horizon
        self._max_rows = max_rows
        self._min_rows = min_rows
        self._adaptive_horizon = adaptive_horizon
        self._plain_mode = plain_mode
        self._device = device
        self._record = empty_record(self.max_horizon, self._device)
        self._drafted = 0  # request-rounds in the record
        self._predicted = self._accepted = _TRUST_PRIOR
        self._horizon = self.max_horizon
        self._plain_rounds = 0  # since the last drafted one
        self._probe_distance = FIRST_PROBE
        self._is_probe = False
        self._worthwhile = 0.0  # tokens that this round must emit to be as fast as plain decoding

    @property
    def trust(self) -> float:
        """Accepted nodes over the survival predicted for them, faded; 1 before anything is known."""
        low, high = TRUST_LIMITS
        return min(max(self._accepted / max(self._predicted, 1e-6), low), high)

    # ------------------------------------------------------------ before the draft

    def horizon(self, requests: int, context: int) -> int:
        """Positions to draft in this round, 0 for plain decoding.

        context: tokens in the prefixes of all requests together.
        """
        self._is_probe = self._drafted < WARM_UP
        if self.costs is None or self._is_probe:
            return self.max_horizon
        plain, drafted = self._speeds(requests, context)
        best = max(range(len(drafted)), key=drafted.__getitem__) + 1 if self._adaptive_horizon else self.max_horizon
        choice = best
        if self._horizon > 0 and self._adaptive_horizon:
            stays = drafted[self._horizon - 1] * (1.0 + MARGIN) >= drafted[best - 1]
            choice = self._horizon if stays else best
        if self._plain_mode:
            # Whoever is in has the margin on its side.
            handicap = 1.0 + MARGIN if self._horizon > 0 else 1.0 / (1.0 + MARGIN)
            if plain > drafted[choice - 1] * handicap:
                return self._plain_or_probe(best)
        self._horizon = choice
        self._probe_distance = FIRST_PROBE
        return choice

    def _plain_or_probe(self, probe_horizon: int) -> int:
        self._horizon = 0
        self._plain_rounds += 1
        self._is_probe = self._plain_rounds >= self._probe_distance
        return probe_horizon if self._is_probe else 0

    def _speeds(self, requests: int, context: int) -> tuple[float, list[float]]:
        """Expected tokens per second of plain decoding, and of every horizon with its best total."""
        assert self.costs is not None
        totals = self._totals(requests)
        verify = self.costs.verify_seconds(totals.clamp(max=requests * self._max_rows), requests, context)
        around = [
            self.costs.draft_seconds(requests, h) + self.costs.host_seconds(requests)
            for h in range(1, self.max_horizon + 1)
        ]
        seconds = verify + torch.tensor(around, device=verify.device).unsqueeze(1)
        tokens = record_tokens(self._record, requests, totals, self.trust)
        drafted = (tokens / seconds).amax(1).tolist()
        return requests / self.plain_seconds(requests, context), drafted

    def plain_seconds(self, requests: int, context: int) -> float:
        """How long a round without a draft should take; 0 where nothing is measured."""
        if self.costs is None:
            return 0.0
        anchors = torch.tensor([requests], device=self.costs.verify.device)
        verify = float(self.costs.verify_seconds(anchors, requests, context))
        return verify + self.costs.host_seconds(requests, plain=True)

    # ------------------------------------------------------------ after the draft

    def total(self, tree: CandidateTree, survival: Tensor, keep: Tensor, budgeted: bool, context: int) -> Rows:
        """Choose the batch's rows for candidate trees [R, N] whose policy wants `keep`.

        budgeted: the policy shares one budget over the batch; otherwise it gets what it wants. On a CPU the number is
        read from this round's survival. A device would have to wait for that; there ``relayed_total`` says it.
        """
        requests = keep.shape[0]
        if self.costs is None or not budgeted:
            total = int(keep.sum())
            return Rows(keep, total, LIGHT, self._round_seconds(tree.horizon, requests, total, context))
        totals = self._totals(requests)
        ranking = floor_first(survival, keep, self._min_rows)
        tokens = expected_tokens(survival, tree.valid, keep, totals, ranking)
        # A probe believes in its draft: with rows for nothing it would find out nothing.
        trust = max(self.trust, 1.0) if self._is_probe else self.trust
        tokens = requests + trust * (tokens - requests)
        wanted, available = int(keep.sum()), int(tree.valid.sum())
        # Where rows have no shape that must be kept to, padding is never computed, nor paid for.
        seconds = self._seconds(tree.horizon, requests, totals.clamp(max=available), context)
        index = int(choose_total(tokens, seconds))
        total = min(int(totals[index]), available)
        mode = SATURATED if total == requests and wanted > requests else LIGHT if total >= wanted else HEAVY
        self._worthwhile = requests * float(seconds[index]) / self.plain_seconds(requests, context)
        return Rows(fill_rows(tree, ranking, keep, total), total, mode, float(seconds[index]))

    def relayed_total(self, requests: int, horizon: int, context: int) -> int:
        """The best total by the survival of earlier rounds, for devices that cannot wait for this one's."""
        assert self.costs is not None
        totals = self._totals(requests)
        tokens = record_tokens(self._record, requests, totals, self.trust)[horizon - 1]
        return int(totals[choose_total(tokens, self._seconds(horizon, requests, totals, context))])

    def _seconds(self, horizon: int, requests: int, totals: Tensor, context: int) -> Tensor:
        assert self.costs is not None
        around = self.costs.draft_seconds(requests, horizon) + self.costs.host_seconds(requests)
        return self.costs.verify_seconds(totals, requests, context) + around

    def _round_seconds(self, horizon: int, requests: int, total: int, context: int) -> float:
        if self.costs is None:
            return 0.0
        return float(self._seconds(horizon, requests, torch.tensor([total], device=self._device), context))

    def _totals(self, requests: int) -> Tensor:
        assert self.costs is not None
        return _totals_tensor(requests, self._max_rows, self.costs.tile, self._min_rows, str(self._device))

    # ------------------------------------------------------------ after the round

    def observe(self, tree: CandidateTree, survival: Tensor, wanted: Tensor, kept: Tensor, accepted: Tensor) -> None:
        """Remember a drafted round: wanted and kept [R, N] bool, accepted [R] int64 nodes per request."""
        if self.costs is None:
            return
        requests = wanted.shape[0]
        self._drafted += requests
        stands_for = requests * min(1 + self._plain_rounds, _PROBE_STANDS_FOR)
        self._plain_rounds = 0
        keep = 0.5 ** (stands_for / HALF_LIFE)
        share = max(1.0 - keep, requests / self._drafted)
        new = round_record(survival, tree.depths, wanted, self.max_horizon)
        self._record = faded(self._record, new, share, tree.horizon)
        nodes = torch.where(kept & (tree.depths > 0), survival.nan_to_num(0.0), 0.0).sum()
        predicted, came_true = torch.stack((nodes, accepted.sum().to(nodes.dtype))).tolist()
        weight = stands_for / requests
        self._predicted = keep * self._predicted + weight * predicted
        self._accepted = keep * self._accepted + weight * came_true
        if self._is_probe and self._horizon == 0:
            is_faster = requests + came_true > self._worthwhile
            self._probe_distance = SOON_PROBE if is_faster else min(2 * self._probe_distance, LAST_PROBE)


@functools.lru_cache(maxsize=256)
def _totals_tensor(requests: int, max_rows: int, tile: int, min_rows: int, device: str) -> Tensor:
    return torch.tensor(candidate_totals(requests, max_rows, tile, min_rows), device=device)
