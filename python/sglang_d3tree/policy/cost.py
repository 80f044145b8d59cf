"""What a round costs: a profile measured once per machine and pair of models, and the tables that decisions read.

Pure torch and JSON; ``runtime/calibration.py`` does the measuring.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_d3tree.tree.budget import candidate_totals

PROFILE_FLAG = "--speculative-d3tree-cost-profile"
FORMAT = 1
# `d3tree calibrate` sets both for the server it starts: where the profile goes, and how long measuring may take.
FILE_VARIABLE = "SGLANG_D3TREE_CALIBRATION_FILE"
SECONDS_VARIABLE = "SGLANG_D3TREE_CALIBRATION_SECONDS"

# Tile widths that matrix kernels are known to use, and the share of a step's rise that may happen inside a tile.
TILES = (128, 64, 32, 16, 8)
_STAIRCASE_SLOPE = 0.25
# Without a staircase every row costs its share, yet every row count is a shape that kernels are set up for when it
# first comes (5 to 25 ms on the CPU this was written on), so rows come in small groups all the same.
SMALLEST_TILE = 4


@dataclass(frozen=True)
class VerifyCost:
    """Costs of one round for one request, in any common unit.

    draft, a number: the draft pass. verify [N] float32: the verify pass with 1 to N rows, so verify[n] is the cost
    of n nodes and their anchor.
    """

    draft: float
    verify: Tensor


def linear_cost(
    max_rows: int, draft: float = 0.3, first_row: float = 1.0, per_row: float = 0.0129, device: str | None = None
) -> VerifyCost:
    """A stand-in where nothing was measured: the first row costs one decode step, every further row per_row.

    The defaults, in units of one decode step, put 32 rows at 1.4 and the draft at 0.3 (METHOD 8, last point).
    """
    rows = torch.arange(max_rows, dtype=torch.float32, device=device)
    return VerifyCost(draft, first_row + per_row * rows)


@dataclass(frozen=True)
class Curve:
    """Seconds at some row counts; straight lines in between, the last line prolonged beyond.

    rows ascending from 1 or more; seconds never fall (``measured_curve`` sees to it). Below the first row count the
    first value holds.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def table(self, length: int, device: str | torch.device | None = None) -> Tensor:
        """[length] float32: seconds at 0, 1, ... length - 1 rows; 0 at no rows."""
        at = torch.arange(length, dtype=torch.float64)
        rows = torch.tensor(self.rows, dtype=torch.float64)
        seconds = torch.tensor(self.seconds, dtype=torch.float64)
        if len(self.rows) == 1:
            values = seconds.expand(length).clone()
        else:
            left = (torch.searchsorted(rows, at, right=True) - 1).clamp(0, len(self.rows) - 2)
            slope = (seconds[left + 1] - seconds[left]) / (rows[left + 1] - rows[left])
            values = seconds[left] + slope * (at - rows[left])
            values = torch.where(at < rows[0], seconds[0], values)
        values[:1] = 0.0
        return values.to(torch.float32).to(device or "cpu")

    def at(self, rows: int) -> float:
        """Seconds at one row count."""
        return float(self.table(rows + 1)[rows])


def measured_curve(rows: Sequence[int], seconds: Sequence[float]) -> Curve:
    """The closest curve that never falls: neighbours that contradict each other share their mean (pool adjacent
    violators). A pass with more rows that seemed faster was measured badly, and would draw every decision to it.

    Raises ValueError for empty, unequal, unsorted or non-positive input.
    """
    if not rows or len(rows) != len(seconds):
        raise ValueError(f"{len(rows)} row counts and {len(seconds)} timings do not make a curve")
    if list(rows) != sorted(set(rows)) or rows[0] < 1 or min(seconds) <= 0:
        raise ValueError(f"a curve needs ascending row counts and positive seconds, got {list(rows)}, {list(seconds)}")
    pools: list[tuple[float, int]] = []
    for value in seconds:
        total, count = float(value), 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            before = pools.pop()
            total, count = total + before[0], count + before[1]
        pools.append((total, count))
    clean = [total / count for total, count in pools for _ in range(count)]
    return Curve(tuple(int(r) for r in rows), tuple(clean))


def find_tile(rows: Sequence[int], seconds: Sequence[float]) -> int:
    """The row tile of the matrix kernels, read off the staircase of their times (METHOD 8).

    rows are consecutive integers from 1; seconds their times. A width is a tile if the time hardly rises within it and
    jumps where the next one begins: over all whole tiles measured but the first, which memory dominates, the rise
    inside is at most a quarter of the rise from one tile to the next. The widest such width counts; SMALLEST_TILE
    where there is no staircase. Raises ValueError for other rows.
    """
    if list(rows) != list(range(1, len(rows) + 1)):
        raise ValueError("the tile is read off consecutive row counts from 1")
    curve = measured_curve(rows, seconds).seconds
    for tile in TILES:
        starts = range(tile, len(curve) - tile, tile)  # index of each tile's first row, its successor measured too
        whole = sum(curve[first + tile] - curve[first] for first in starts)
        inside = sum(curve[first + tile - 1] - curve[first] for first in starts)
        if whole > 0.02 * curve[0] * len(starts) and inside <= _STAIRCASE_SLOPE * whole:
            return tile
    return SMALLEST_TILE


@dataclass(frozen=True)
class ProfileKey:
    """What a profile depends on. Paths are left out on purpose: a moved checkpoint is the same model."""

    target: str
    drafter: str
    dtype: str
    device: str
    threads: int
    versions: str

    def differences(self, other: ProfileKey) -> list[str]:
        """The fields that differ, as "name: ours, theirs" phrases."""
        return [
            f"{f.name} {getattr(other, f.name)!r} instead of {getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]


@dataclass(frozen=True)
class CostProfile:
    """Seconds of the parts of a round, measured through the code that serves.

    verify: the target's pass by total rows, prefixes short. draft: the draft pass by rows (requests x block).
    propose: LM head, candidates and survival by drafted positions (requests x horizon). round_host and plain_host:
    (fixed, per request) seconds that a drafting and a plain round spend outside those. per_key: seconds of the
    target's pass per token of all requests' prefixes. per_row_key: seconds per pair of a row and a token of its
    request's prefix. tile: rows come in multiples of it.
    """

    key: ProfileKey
    verify: Curve
    draft: Curve
    propose: Curve
    round_host: tuple[float, float]
    plain_host: tuple[float, float]
    per_key: float
    per_row_key: float
    tile: int

    def save(self, path: Path) -> None:
        """Write readable JSON; the name appears only once the file is whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")
        os.replace(partial, path)

    @staticmethod
    def load(path: Path) -> CostProfile:
        """Read what ``save`` wrote.

        Raises ValueError, naming the flag, for a file that is missing or no profile of this version.
        """
        try:
            raw = json.loads(path.read_text())
            if raw.pop("format") != FORMAT:
                raise ValueError("another format version")
            return _from_json(raw)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{PROFILE_FLAG} {path} is not a readable cost profile ({type(error).__name__}: {error}); make one "
                "with 'd3tree calibrate'."
            ) from error

    def check(self, key: ProfileKey, source: str) -> None:
        """Refuse a profile of another model, machine or precision.

        Raises ValueError naming the flag and what differs.
        """
        found = key.differences(self.key)
        if found:
            raise ValueError(
                f"{PROFILE_FLAG} {source} was measured for something else: {'; '.join(found)}. Make one with "
                "'d3tree calibrate', or use auto or none."
            )


def _from_json(raw: dict[str, Any]) -> CostProfile:
    def curve(name: str) -> Curve:
        return measured_curve(raw[name]["rows"], raw[name]["seconds"])

    def pair(name: str) -> tuple[float, float]:
        fixed, per_request = raw[name]
        return float(fixed), float(per_request)

    return CostProfile(
        key=ProfileKey(**raw["key"]),
        verify=curve("verify"),
        draft=curve("draft"),
        propose=curve("propose"),
        round_host=pair("round_host"),
        plain_host=pair("plain_host"),
        per_key=float(raw["per_key"]),
        per_row_key=float(raw["per_row_key"]),
        tile=int(raw["tile"]),
    )


@dataclass(frozen=True)
class CostTables:
    """A profile as the decisions of a round read it, for batches of up to max_requests with up to max_rows rows each.

    verify [L] float32 on the device: the target's pass by rows, up to the largest of `candidate_totals`. The rest are
    host numbers: a round's shape is known to the host, only its survival is not.
    """

    verify: Tensor
    draft: tuple[float, ...]
    propose: tuple[float, ...]
    round_host: tuple[float, float]
    plain_host: tuple[float, float]
    per_key: float
    per_row_key: float
    tile: int

    def draft_seconds(self, requests: int, horizon: int) -> float:
        """A draft pass over blocks of horizon masks and the anchor, its LM head and candidates."""
        return self.draft[requests * (horizon + 1)] + self.propose[requests * horizon]

    def verify_seconds(self, totals: Tensor, requests: int, context: int) -> Tensor:
        """The target's pass for each of totals [C] int64 rows -> [C] float32.

        context: tokens in the prefixes of all the requests together.
        """
        keys = self.per_key * context
        return self.verify[totals] + keys + totals * (self.per_row_key * context / max(requests, 1))

    def host_seconds(self, requests: int, plain: bool = False) -> float:
        """What a round spends around its passes."""
        fixed, per_request = self.plain_host if plain else self.round_host
        return fixed + per_request * requests

    def one_request(self, max_rows: int, horizon: int) -> VerifyCost:
        """The costs as caddtree's formula takes them: one request at a time, everything that is not the target's pass
        counted as draft (METHOD 2)."""
        draft = self.draft_seconds(1, horizon) + self.host_seconds(1)
        return VerifyCost(draft, self.verify[1 : max_rows + 1])


def cost_tables(
    profile: CostProfile, max_requests: int, max_rows: int, block_size: int, device: str | torch.device | None = None
) -> CostTables:
    """Lay a profile's curves out as tables."""
    largest = candidate_totals(max_requests, max_rows, profile.tile)[-1]
    return CostTables(
        verify=profile.verify.table(largest + 1, device),
        draft=tuple(profile.draft.table(max_requests * block_size + 1).tolist()),
        propose=tuple(profile.propose.table(max_requests * block_size + 1).tolist()),
        round_host=profile.round_host,
        plain_host=profile.plain_host,
        per_key=profile.per_key,
        per_row_key=profile.per_row_key,
        tile=profile.tile,
    )
