"""The whole chain of a round, the policies, and the kernel table."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tree_build import random_candidates
from test_tree_head import WIDTH, random_head
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from sgl_kernel_ext import dispatch
from sglang_d3tree.policy.baselines import POLICIES
from sglang_d3tree.policy.cost import VerifyCost, linear_cost
from sglang_d3tree.tree.accept import accept_greedy, advance, start_walk
from sglang_d3tree.tree.budget import fill_rows
from sglang_d3tree.tree.build import build_tree
from sglang_d3tree.tree.candidates import Candidates, draft_candidates
from sglang_d3tree.tree.edges import draft_edges
from sglang_d3tree.tree.head import head_edges, prepare_head
from sglang_d3tree.tree.layout import layout_rows

MAX_ROWS, CAPACITY, HORIZON = 16, 64, 5


def plan(policy: str, candidates: Candidates, *arguments):
    """A policy's plan where nothing is trained."""
    return POLICIES[policy](candidates, draft_edges(candidates), *arguments)


def decode_round(policy: str, logits, horizons, anchors, target_tokens, threshold, cost, hidden=None, head=None):
    candidates = draft_candidates(logits, 6, horizons)
    edges = draft_edges(candidates) if head is None else head_edges(head, candidates, hidden, anchors)
    tree, keep, survival = POLICIES[policy](candidates, edges, anchors, MAX_ROWS, threshold, cost)
    keep = fill_rows(tree, survival, keep, CAPACITY - 8)
    rows = layout_rows(tree, keep, CAPACITY)
    walk = start_walk(rows, HORIZON)
    for step in range(HORIZON + 1):
        walk = advance(rows, walk, target_tokens[walk.row], step)
    return rows, walk, accept_greedy(rows, target_tokens, HORIZON)


def round_inputs(device="cpu"):
    return {
        "logits": torch.randn(7, HORIZON, 500, device=device) * 4,
        "horizons": torch.arange(7, device=device) % (HORIZON + 1),
        "anchors": torch.arange(7, device=device),
        "target_tokens": torch.randint(0, 500, (CAPACITY,), device=device),
        "threshold": torch.full((), 1e-3, device=device),
        "cost": linear_cost(MAX_ROWS, device=device),
    }


@pytest.mark.parametrize("policy", POLICIES)
def test_a_round_never_reads_a_value_on_the_host(policy):
    with FakeTensorMode():
        rows, walk, greedy = decode_round(policy, **round_inputs())
        with pytest.raises(DataDependentOutputException):  # the mode does notice a look at a value
            bool(walk.alive.any())
    assert rows.ancestor_mask.shape == (CAPACITY, MAX_ROWS)
    assert walk.path_rows.shape == greedy.path_rows.shape == (7, HORIZON + 1)


@pytest.mark.parametrize("kind", ["linear", "path"])
def test_a_round_with_a_trained_head_never_reads_a_value_on_the_host(kind):
    with FakeTensorMode():
        weights, embedding = random_head(0, kind, exclusive=True), torch.randn(500, WIDTH)
        head = prepare_head(weights, [embedding])
        rows, *_ = decode_round("d3tree", **round_inputs(), hidden=torch.randn(7, HORIZON, WIDTH), head=head)
    assert rows.ancestor_mask.shape == (CAPACITY, MAX_ROWS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_round_is_captured_in_a_cuda_graph_and_agrees_with_the_cpu(policy):
    inputs = round_inputs("cuda")
    decode_round(policy, **inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode_round(policy, **inputs)
    for _ in range(2):
        fresh = round_inputs()
        for name in ("logits", "horizons", "anchors", "target_tokens"):
            inputs[name].copy_(fresh[name])
        graph.replay()
        expected = decode_round(policy, **fresh)
        for ours, reference in zip(captured, expected, strict=True):
            for field, value in vars(reference).items():
                assert torch.equal(getattr(ours, field).cpu(), value), field


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_hands_over_a_closed_tree(policy):
    candidates = random_candidates(4, 6, HORIZON, 5)
    tree, keep, survival = plan(policy, candidates, torch.arange(6), MAX_ROWS, 0.05, linear_cost(MAX_ROWS))
    assert keep.shape == survival.shape == (6, MAX_ROWS) and keep[:, 0].all()
    assert (keep <= (keep.gather(1, tree.parents) & tree.valid)).all()
    assert (survival <= survival.gather(1, tree.parents)).all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    per_row=st.floats(0, 0.5),
    max_rows=st.integers(1, 20),
    draft=st.floats(0, 1),
)
def test_caddtree_stops_at_the_best_speed(seed, per_row, max_rows, draft):
    candidates = random_candidates(seed, 3, 4, 4)
    cost = linear_cost(max_rows + 2, draft=draft, per_row=per_row)
    tree, keep, survival = plan("caddtree", candidates, torch.arange(3), max_rows, 0.0, cost)
    for request in range(3):
        nodes = int(tree.valid[request].sum()) - 1
        speeds = [
            float(survival[request, : n + 1].double().sum()) / (draft + float(cost.verify[n])) for n in range(nodes + 1)
        ]
        chosen = int(keep[request].sum()) - 1
        assert keep[request, : chosen + 1].all()
        assert speeds[chosen] == pytest.approx(max(speeds), rel=1e-5)


def test_caddtree_follows_the_cost():
    candidates = random_candidates(4, 6, HORIZON, 5)
    anchors = torch.arange(6)
    full = build_tree(candidates, anchors, MAX_ROWS).valid
    free = VerifyCost(0.3, torch.ones(MAX_ROWS))
    dear = VerifyCost(0.3, 1 + 10 * torch.arange(MAX_ROWS, dtype=torch.float32))
    assert torch.equal(plan("caddtree", candidates, anchors, MAX_ROWS, 0.0, free)[1], full)
    assert plan("caddtree", candidates, anchors, MAX_ROWS, 0.0, dear)[1].sum() == 6
    tile = VerifyCost(0.3, dear.verify.clone())
    tile.verify[-1] = 0.1  # measured costs may fall: a tree too small for the cheap row count cannot have it
    chain = Candidates(candidates.token_ids[..., :1], candidates.log_probs[..., :1], candidates.horizons)
    assert plan("caddtree", chain, anchors, MAX_ROWS, 0.0, tile)[1].sum() == 6
    with pytest.raises(ValueError):
        plan("caddtree", candidates, anchors, MAX_ROWS + 1, 0.0, free)


def test_the_table_prefers_the_fastest_kernel_of_a_device(monkeypatch):
    monkeypatch.setattr(dispatch, "KERNELS", {"double": {"reference": lambda x: 2 * x}})
    dispatch.register("double", "cpp", lambda x: x + x)
    implementations = dispatch.KERNELS["double"]
    assert dispatch.get_kernel("double", "cpu") is implementations["cpp"]
    assert dispatch.get_kernel("double", "cuda") is implementations["reference"]
    assert dispatch.get_kernel("double", "xpu") is implementations["reference"]
    dispatch.register("only_fast", "triton", abs)
    assert dispatch.get_kernel("only_fast", "cuda") is abs
    with pytest.raises(KeyError):
        dispatch.get_kernel("only_fast", "cpu")
    with pytest.raises(KeyError):
        dispatch.get_kernel("missing", "cpu")
    with pytest.raises(ValueError):
        dispatch.register("double", "cuda", abs)
