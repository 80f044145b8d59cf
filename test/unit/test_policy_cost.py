"""Measured costs: clean curves, tiles off a staircase, files that fit or are refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_d3tree.policy.cost import (
    SMALLEST_TILE,
    TILES,
    CostProfile,
    Curve,
    ProfileKey,
    cost_tables,
    find_tile,
    measured_curve,
)
from sglang_d3tree.tree.budget import candidate_totals

KEY = ProfileKey("Target 1", "Drafter 2", "bfloat16", "a CPU", 2, "torch 1")
PROFILE = CostProfile(
    key=KEY,
    verify=Curve((1, 32, 64), (1.0, 1.4, 2.0)),
    draft=Curve((8, 64), (0.2, 0.3)),
    propose=Curve((7, 56), (0.1, 0.2)),
    round_host=(0.05, 0.001),
    plain_host=(0.02, 0.0005),
    per_key=1e-5,
    per_row_key=1e-6,
    tile=8,
)

timings = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=12)


@given(seconds=timings)
def test_a_measured_curve_never_falls_and_keeps_the_mean(seconds):
    rows = [2**i for i in range(len(seconds))]
    curve = measured_curve(rows, seconds)
    assert all(a <= b * (1 + 1e-12) for a, b in zip(curve.seconds, curve.seconds[1:], strict=False))
    assert sum(curve.seconds) == pytest.approx(sum(seconds))
    if seconds == sorted(seconds):
        assert curve.seconds == pytest.approx(seconds)


@given(seconds=timings)
def test_the_clean_curve_is_the_closest_one(seconds):
    """Against small changes that keep it monotone: none comes closer in least squares."""
    curve = measured_curve(list(range(1, len(seconds) + 1)), seconds).seconds

    def distance(values):
        return sum((a - b) ** 2 for a, b in zip(values, seconds, strict=True))

    for i in range(len(seconds)):
        for change in (-0.01, 0.01):
            for length in range(1, len(seconds) - i + 1):
                moved = [v + change * (i <= k < i + length) for k, v in enumerate(curve)]
                if moved == sorted(moved):
                    assert distance(moved) >= distance(curve) - 1e-9


@pytest.mark.parametrize(
    "rows, seconds", [([], []), ([1, 1], [1.0, 1.0]), ([2, 1], [1.0, 2.0]), ([1], [0.0]), ([1], [])]
)
def test_impossible_timings_are_refused(rows, seconds):
    with pytest.raises(ValueError):
        measured_curve(rows, seconds)


def test_a_table_is_straight_between_points_and_prolonged_beyond():
    table = Curve((2, 4, 8), (1.0, 2.0, 6.0)).table(11)
    assert table.tolist() == [0.0, 1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert Curve((3,), (1.0,)).table(5).tolist() == [0.0, 1.0, 1.0, 1.0, 1.0]


def staircase(tile: int, length: int, slope: float = 0.0, noise: float = 0.0) -> list[float]:
    """Seconds of a machine that computes whole tiles; slope is a row's own share, noise a random part of each time."""
    generator = torch.Generator().manual_seed(tile)
    values = [1.0 + 0.5 * ((r - 1) // tile) + slope * (r - 1) for r in range(1, length + 1)]
    return [v * (1.0 + noise * float(torch.rand((), generator=generator))) for v in values]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_the_tile_is_found_in_a_staircase(tile, noise):
    seconds = staircase(tile, 257, slope=0.02 / tile, noise=noise)
    assert find_tile(range(1, 258), seconds) == tile


@pytest.mark.parametrize("per_row", [0.0, 0.01, 0.5])
def test_without_a_staircase_the_smallest_tile_serves(per_row):
    assert find_tile(range(1, 130), [1.0 + per_row * r for r in range(129)]) == SMALLEST_TILE
    noisy = staircase(1, 129, noise=0.03)
    assert find_tile(range(1, 130), noisy) == SMALLEST_TILE


def test_a_profile_survives_the_disk_and_is_readable(tmp_path: Path):
    path = tmp_path / "deep" / "profile.json"
    PROFILE.save(path)
    assert CostProfile.load(path) == PROFILE
    assert json.loads(path.read_text())["verify"]["rows"] == [1, 32, 64]
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    "field, value", [("target", "Other"), ("device", "a GPU"), ("dtype", "float32"), ("threads", 1)]
)
def test_a_profile_of_something_else_is_refused_naming_flag_and_difference(field, value):
    PROFILE.check(KEY, "auto")
    with pytest.raises(ValueError, match=f"--speculative-d3tree-cost-profile file.json .*{field}") as error:
        PROFILE.check(dataclasses.replace(KEY, **{field: value}), "file.json")
    assert str(getattr(KEY, field)) in str(error.value) and str(value) in str(error.value)


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"format": 0}', '{"format": 1, "verify": 3}'])
def test_an_unreadable_profile_is_refused_naming_the_flag(tmp_path: Path, text):
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"--speculative-d3tree-cost-profile .*d3tree calibrate"):
        CostProfile.load(path)


def test_tables_cover_every_total_a_batch_may_take():
    tables = cost_tables(PROFILE, max_requests=5, max_rows=32, block_size=8)
    for requests in range(1, 6):
        totals = torch.tensor(candidate_totals(requests, 32, PROFILE.tile))
        seconds = tables.verify_seconds(totals, requests, context=100 * requests)
        expected = PROFILE.verify.table(400)[totals] + 1e-5 * 100 * requests + 1e-6 * 100 * totals
        torch.testing.assert_close(seconds, expected)
        assert tables.draft_seconds(requests, 7) == pytest.approx(
            PROFILE.draft.at(8 * requests) + PROFILE.propose.at(7 * requests)
        )
    assert tables.host_seconds(4) == pytest.approx(0.054) and tables.host_seconds(4, plain=True) == pytest.approx(0.022)


def test_caddtree_sees_one_request_alone():
    cost = cost_tables(PROFILE, 8, 32, 8).one_request(32, 7)
    assert cost.draft == pytest.approx(0.2 + 0.1 + 0.051)
    assert cost.verify.shape == (32,) and cost.verify[0] == 1.0 and cost.verify[31] == pytest.approx(1.4)
