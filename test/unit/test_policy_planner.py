"""A round's decisions over time: how far to draft, when not to, and that they settle."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tree_budget import kinds, random_survival, trees
from test_tree_build import random_candidates
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang_d3tree.policy.cost import CostTables
from sglang_d3tree.policy.planner import FIRST_PROBE, HEAVY, LIGHT, SATURATED, WARM_UP, Planner
from sglang_d3tree.policy.record import BINS, empty_record, faded, record_tokens, round_record
from sglang_d3tree.tree.budget import candidate_totals, choose_total, expected_tokens, whole_tree
from sglang_d3tree.tree.build import CandidateTree, build_tree
from sglang_d3tree.tree.candidates import Candidates

HORIZON, MAX_ROWS, MOST = 5, 16, 64


def tables(base=1.0, per_row=0.01, draft=0.1, per_position=0.0, tile=4, host=0.0) -> CostTables:
    """Costs on straight lines, for up to MOST requests."""
    rows = torch.arange(2 * MOST * MAX_ROWS + 1, dtype=torch.float32)
    positions = tuple(per_position * i for i in range(MOST * (HORIZON + 1) + 1))
    flat = (draft,) * len(positions)
    return CostTables(base + per_row * rows, flat, positions, (host, 0.0), (host, 0.0), 0.0, 0.0, tile)


def a_tree(requests: int, seed: int = 0, horizon: int = HORIZON) -> CandidateTree:
    return build_tree(random_candidates(seed, requests, horizon, 4), torch.arange(requests), MAX_ROWS)


def flat_survival(tree: CandidateTree, conditional: float) -> torch.Tensor:
    return (conditional ** tree.depths.float()) * tree.valid


def steady_tree(requests: int, conditional: float, horizon: int) -> tuple[CandidateTree, torch.Tensor]:
    """Trees of a draft that is the same at every depth, best token with probability `conditional`, and their survival.

    A shorter horizon drafts the same candidates less far.
    """
    shares = torch.tensor([conditional, *(conditional * (1 - conditional) * 0.5**i for i in range(1, 4))])
    log_probs = shares.log().expand(requests, horizon, 4)
    candidates = Candidates(torch.arange(4).expand_as(log_probs), log_probs, torch.full((requests,), horizon))
    tree = build_tree(candidates, torch.arange(requests), MAX_ROWS)
    return tree, tree.log_scores.exp()


class Server:
    """Rounds of a server whose drafts come true exactly as often as predicted."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner

    def round(self, requests: int, conditional: float, true_share: float = 1.0) -> int:
        """One round; returns its horizon."""
        horizon = self.planner.horizon(requests, context=100 * requests)
        if horizon:
            tree, survival = steady_tree(requests, conditional, horizon)
            rows = self.planner.total(tree, survival, tree.valid, True, context=100 * requests)
            predicted = float((survival * (rows.keep & (tree.depths > 0))).sum())
            accepted = torch.full((requests,), true_share * predicted / requests)
            self.planner.observe(tree, survival, tree.valid, rows.keep, accepted)
        return horizon

    def rounds(self, count: int, requests: int, conditional: float, true_share: float = 1.0) -> list[int]:
        return [self.round(requests, conditional, true_share) for _ in range(count)]


# ---------------------------------------------------------------- the record


@settings(max_examples=100, deadline=None)
@given(tree=trees, seed=st.integers(0, 2**31), kind=kinds, threshold=st.sampled_from([0.0, 0.1]))
def test_a_record_of_one_round_expects_what_that_round_expects(tree, seed, kind, threshold):
    """Within the width of a bin, a quarter of a halving; exactly when all nodes are taken."""
    survival = random_survival(tree, seed, kind)
    keep = whole_tree(tree, survival, threshold)
    requests = keep.shape[0]
    totals = torch.arange(requests, int(keep.sum()) + 1)
    record = round_record(survival, tree.depths, keep, tree.horizon)
    found = record_tokens(record, requests, totals)[-1] - requests
    exact = expected_tokens(survival, keep, keep, totals) - requests
    assert (found <= exact * 1.001 + 1e-5).all()
    assert (found >= exact * 2**-0.25 - 1e-5).all()
    torch.testing.assert_close(found[-1], exact[-1], rtol=1e-4, atol=1e-5)


def test_a_shorter_horizon_expects_the_nodes_it_can_have():
    tree = a_tree(3)
    survival = flat_survival(tree, 0.5)
    record = round_record(survival, tree.depths, tree.valid, HORIZON)
    all_rows = torch.tensor([3 * MAX_ROWS])
    for horizon in range(1, HORIZON + 1):
        shallow = (survival * (tree.depths > 0) * (tree.depths <= horizon)).sum()
        torch.testing.assert_close(record_tokens(record, 3, all_rows)[horizon - 1, 0], 3 + shallow)


def test_a_record_scales_to_any_batch_and_trusts_as_told():
    record = round_record(flat_survival(a_tree(2), 0.7), a_tree(2).depths, a_tree(2).valid, HORIZON)
    few = record_tokens(record, 2, torch.tensor([2, 10, 20]))
    many = record_tokens(record, 20, torch.tensor([20, 100, 200]))
    torch.testing.assert_close(many, 10 * few)
    half = record_tokens(record, 2, torch.tensor([2, 10, 20]), trust=0.5)
    torch.testing.assert_close(half - 2, 0.5 * (few - 2))


def test_depths_that_were_not_drafted_are_remembered():
    old = round_record(flat_survival(a_tree(2), 0.7), a_tree(2).depths, a_tree(2).valid, HORIZON)
    now = faded(old, empty_record(HORIZON), 1.0, 2)
    assert (now.counts[:2] == 0).all() and torch.equal(now.counts[2:], old.counts[2:])
    assert old.counts[:2].sum() > 0 and old.counts.shape == (HORIZON, BINS)


def test_the_record_reads_nothing_on_the_host():
    with FakeTensorMode():
        tree_shape = (4, MAX_ROWS)
        survival, keep = torch.rand(tree_shape), torch.ones(tree_shape, dtype=torch.bool)
        depths = torch.randint(0, HORIZON + 1, tree_shape)
        record = faded(empty_record(HORIZON), round_record(survival, depths, keep, HORIZON), 0.5, 3)
        assert record_tokens(record, 4, torch.arange(4, 40)).shape == (HORIZON, 36)


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("per_row, mode", [(0.0, LIGHT), (0.05, HEAVY), (10.0, SATURATED)])
def test_the_load_decides_between_whole_trees_some_nodes_and_none(per_row, mode):
    tree = a_tree(4)
    survival = flat_survival(tree, 0.7)
    rows = Planner(tables(per_row=per_row), HORIZON, MAX_ROWS).total(tree, survival, tree.valid, True, 400)
    assert rows.mode == mode and rows.keep.sum() == rows.total and rows.keep[:, 0].all()
    assert {LIGHT: rows.total == tree.valid.sum(), SATURATED: rows.total == 4}.get(mode, 4 < rows.total < 64)


def test_padding_that_is_never_computed_is_not_paid_for():
    """15 rows cost nothing, the 16th that would fill the tile as much as ten rounds: all 15 are verified."""
    costs = tables(per_row=0.0, tile=16)
    costs.verify[16:] += 10.0
    tree = build_tree(random_candidates(0, 1, HORIZON, 4), torch.zeros(1, dtype=torch.int64), MAX_ROWS - 1)
    rows = Planner(costs, HORIZON, MAX_ROWS).total(tree, flat_survival(tree, 0.7), tree.valid, True, 100)
    assert rows.total == tree.valid.sum() == MAX_ROWS - 1 and rows.mode == LIGHT


def test_whoever_has_no_budget_gets_what_it_wants():
    tree = a_tree(4)
    wanted = tree.valid & (torch.arange(MAX_ROWS) < 5)
    survival = flat_survival(tree, 0.7)
    rows = Planner(tables(per_row=10.0), HORIZON, MAX_ROWS).total(tree, survival, wanted, False, 400)
    assert torch.equal(rows.keep, wanted) and rows.total == wanted.sum()
    unmeasured = Planner(None, HORIZON, MAX_ROWS)
    assert torch.equal(unmeasured.total(tree, survival, wanted, True, 400).keep, wanted)
    assert unmeasured.horizon(64, 0) == HORIZON


@pytest.mark.parametrize("floor", [1, 3])
def test_every_request_keeps_its_floor_and_its_ceiling(floor):
    tree = a_tree(8, seed=3)
    survival = flat_survival(tree, 0.7)
    survival[4:, 1:] *= 1e-3
    planner = Planner(tables(per_row=0.1), HORIZON, MAX_ROWS, min_rows=floor)
    rows = planner.total(tree, survival, tree.valid, True, 400)
    assert (rows.keep.sum(1) >= tree.valid.sum(1).clamp(max=floor)).all() and (rows.keep.sum(1) <= MAX_ROWS).all()
    assert rows.keep[:4].sum() > rows.keep[4:].sum()


def test_rows_that_earlier_rounds_ask_for_are_those_this_round_asks_for():
    """A device takes its total from the record; with steady survival that is the same total, within a bin's width."""
    costs = tables(per_row=0.02)
    planner = Planner(costs, HORIZON, MAX_ROWS)
    Server(planner).rounds(20, requests=8, conditional=0.6)
    tree, survival = steady_tree(8, 0.6, HORIZON)
    now = planner.total(tree, survival, tree.valid, True, 800).total
    relayed = planner.relayed_total(8, HORIZON, 800)
    totals = candidate_totals(8, MAX_ROWS, costs.tile)
    assert abs(totals.index(now) - totals.index(relayed)) <= 1
    seconds = costs.verify[totals] + 0.1
    tokens = expected_tokens(survival, tree.valid, tree.valid, torch.tensor(totals))
    best = float((tokens / seconds)[choose_total(tokens, seconds)])
    assert float(tokens[totals.index(relayed)] / seconds[totals.index(relayed)]) > 0.97 * best


# ---------------------------------------------------------------- horizon and plain mode


def test_nothing_is_decided_before_there_is_evidence():
    server = Server(Planner(tables(draft=100.0), HORIZON, MAX_ROWS))
    assert server.rounds(WARM_UP, requests=1, conditional=0.5) == [HORIZON] * WARM_UP
    assert server.round(1, 0.5) == 0


def test_drafting_that_cannot_pay_stops_and_is_probed_ever_more_rarely():
    server = Server(Planner(tables(draft=5.0), HORIZON, MAX_ROWS))
    server.rounds(WARM_UP, 1, 0.5)
    horizons = server.rounds(2000, 1, 0.5)
    drafted = [i for i, h in enumerate(horizons) if h > 0]
    distances = [b - a for a, b in itertools.pairwise(drafted)]
    assert drafted[0] == FIRST_PROBE - 1 and distances == sorted(distances)
    assert len(drafted) < 10


def test_drafting_comes_back_at_once_when_the_load_falls():
    costs = tables(base=1.0, per_row=0.02, draft=0.1, per_position=0.02)
    server = Server(Planner(costs, HORIZON, MAX_ROWS))
    assert all(server.rounds(30, 1, 0.6))
    loaded = server.rounds(30, 64, 0.6)
    assert sum(h == 0 for h in loaded) > 25
    assert all(server.rounds(30, 1, 0.6))


def test_drafting_comes_back_when_the_text_becomes_easy():
    costs = tables(draft=0.5, per_row=0.02)
    server = Server(Planner(costs, HORIZON, MAX_ROWS))
    assert not any(server.rounds(WARM_UP + 10, 4, 0.05)[WARM_UP:])
    horizons = server.rounds(3000, 4, 0.9)
    back = next(i for i in range(len(horizons)) if all(horizons[i : i + 50]))
    assert back < 300 and all(horizons[back:])


def test_under_load_fewer_positions_are_drafted():
    costs = tables(base=1.0, per_row=0.005, draft=0.05, per_position=0.02)
    alone, loaded = Server(Planner(costs, HORIZON, MAX_ROWS)), Server(Planner(costs, HORIZON, MAX_ROWS))
    assert alone.rounds(60, 1, 0.7)[-1] > loaded.rounds(60, 16, 0.7)[-1] > 0


def test_a_fixed_horizon_is_kept():
    costs = tables(per_position=0.02)
    server = Server(Planner(costs, HORIZON, MAX_ROWS, adaptive_horizon=False))
    assert set(server.rounds(60, 16, 0.7)) <= {0, HORIZON}


@settings(max_examples=30, deadline=None)
@given(draft=st.floats(0.0, 2.0), per_row=st.floats(0.0, 0.1), conditional=st.floats(0.05, 0.95), data=st.data())
def test_steady_conditions_do_not_flap(draft, per_row, conditional, data):
    requests = data.draw(st.integers(1, 16))
    server = Server(Planner(tables(draft=draft, per_row=per_row), HORIZON, MAX_ROWS))
    server.rounds(40, requests, conditional)
    horizons = server.rounds(60, requests, conditional)
    steady = [h for h in horizons if h != 0] if 0 in horizons else horizons
    if 0 in horizons:
        assert len(steady) <= 3  # probes
    else:
        assert len(set(steady)) == 1


@settings(max_examples=30, deadline=None)
@given(draft=st.floats(0.0, 1.0), per_row=st.floats(0.0, 0.1), conditional=st.floats(0.05, 0.95), data=st.data())
def test_the_horizon_is_as_fast_as_the_best_within_the_margin(draft, per_row, conditional, data):
    """Against running every horizon, and none, to its expected speed."""
    requests = data.draw(st.integers(1, 16))
    costs = tables(draft=draft, per_row=per_row, per_position=0.01)
    server = Server(Planner(costs, HORIZON, MAX_ROWS))
    chosen = server.rounds(60, requests, conditional)[-1]

    def speed(horizon: int) -> float:
        if horizon == 0:
            return requests / float(costs.verify[requests])
        tree, survival = steady_tree(requests, conditional, horizon)
        totals = torch.tensor(candidate_totals(requests, MAX_ROWS, costs.tile))
        tokens = expected_tokens(survival, tree.valid, tree.valid, totals)
        return float((tokens / (costs.verify[totals] + costs.draft_seconds(requests, horizon))).max())

    best = max(speed(h) for h in range(HORIZON + 1))
    assert speed(chosen) >= 0.9 * best


def test_survival_that_does_not_come_true_is_trusted_less():
    believer = Server(Planner(tables(draft=0.3, per_row=0.02), HORIZON, MAX_ROWS))
    believer.rounds(100, 4, 0.6, true_share=1.0)
    assert believer.planner.trust == pytest.approx(1.0, abs=0.05)
    doubter = Server(Planner(tables(draft=0.3, per_row=0.02), HORIZON, MAX_ROWS))
    horizons = doubter.rounds(200, 4, 0.6, true_share=0.1)
    assert doubter.planner.trust < 0.5 and horizons[-1] == 0
