"""The tree-size head: its size, its formula, and how trees use it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tree_build import random_candidates, random_edges

from sglang_d3tree.tree.build import build_tree
from sglang_d3tree.tree.candidates import Candidates
from sglang_d3tree.tree.edges import draft_edges
from sglang_d3tree.tree.head import HeadWeights, PathWeights, draft_odds, head_edges, prepare_head
from sglang_d3tree.tree.survival import conditional_survival, path_product

WIDTH, RANK, VOCABULARY = 12, 5, 9


def random_head(seed: int, kind: str, exclusive: bool = False) -> HeadWeights:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / 2

    path = PathWeights(draw(RANK, WIDTH), draw(RANK, WIDTH), draw(RANK, WIDTH)) if kind == "path" else None
    return HeadWeights(draw(WIDTH), draw(WIDTH), draw(), draw(), path, exclusive)


def round_inputs(seed: int, requests: int = 3, horizon: int = 4, topk: int = 5):
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(VOCABULARY, WIDTH, generator=generator)
    hidden = torch.randn(requests, horizon, WIDTH, generator=generator)
    anchors = torch.randint(0, VOCABULARY, (requests,), generator=generator)
    return embedding, hidden, anchors, random_candidates(seed, requests, horizon, topk)


def survival_by_hand(head: HeadWeights, embedding, h, parent: int, ids, log_probs) -> list[float]:
    """METHOD 3 and 3b for one parent, one candidate at a time."""
    logits = []
    none = max(1e-6, 1 - sum(math.exp(p) for p in log_probs))
    for token, log_prob in zip(ids, log_probs, strict=True):
        x = log_prob
        if head.path is not None:
            x = log_prob - math.log(none if head.exclusive else max(1e-6, 1 - math.exp(log_prob)))
        z = head.state @ h + head.token @ embedding[token] + head.log_prob * x + head.bias
        if head.path is not None:
            z = z + (head.path.parent @ embedding[parent] + head.path.query @ h) @ (head.path.child @ embedding[token])
        logits.append(float(z) if log_prob > -torch.inf else -math.inf)
    if head.exclusive:
        total = 1 + sum(math.exp(z) for z in logits)
        return [math.exp(z) / total for z in logits]
    return [1 / (1 + math.exp(-z)) for z in logits]


@pytest.mark.parametrize("width", [3, 576])
def test_the_published_head_has_2h_plus_2_parameters(width):
    zeros = torch.zeros(width)
    linear = HeadWeights(zeros, zeros, zeros.sum(), zeros.sum())
    assert linear.num_parameters == 2 * width + 2 and linear.kind == "linear"
    matrix = torch.zeros(32, width)
    path = HeadWeights(zeros, zeros, zeros.sum(), zeros.sum(), PathWeights(matrix, matrix, matrix))
    assert path.num_parameters == 2 * width + 2 + 3 * 32 * width and path.kind == "path"


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), kind=st.sampled_from(["linear", "path"]), exclusive=st.booleans())
def test_survival_follows_the_formula(seed, kind, exclusive):
    weights = random_head(seed, kind, exclusive)
    embedding, hidden, anchors, candidates = round_inputs(seed)
    edges = head_edges(prepare_head(weights, [embedding]), candidates, hidden, anchors)
    assert edges.grows == (kind == "path")
    for request, anchor in enumerate(anchors.tolist()):
        for depth in range(hidden.shape[1]):
            ids = candidates.token_ids[request, depth].tolist()
            for rank, below in enumerate(edges.log_survival[request, depth].exp()):
                if kind == "path" and depth == 0 and rank > 0:
                    assert (below == 0).all()
                    continue
                parent = anchor if depth == 0 else int(candidates.token_ids[request, depth - 1, rank])
                expected = survival_by_hand(
                    weights, embedding, hidden[request, depth], parent, ids, candidates.log_probs[request, depth]
                )
                torch.testing.assert_close(below, torch.tensor(expected), atol=1e-5, rtol=1e-4)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), kind=st.sampled_from(["linear", "path"]), exclusive=st.booleans())
def test_a_node_has_the_survival_of_its_own_edge(seed, kind, exclusive):
    """Whether the head grew the tree or only prunes it, a node's conditional is its edge's value."""
    embedding, hidden, anchors, candidates = round_inputs(seed)
    edges = head_edges(prepare_head(random_head(seed, kind, exclusive), [embedding]), candidates, hidden, anchors)
    tree = build_tree(candidates, anchors, 14, edges)
    conditional = conditional_survival(tree, edges)
    survival = path_product(conditional, tree)
    for request in range(len(anchors)):
        for row in range(1, int(tree.valid[request].sum())):
            depth, parent = int(tree.depths[request, row]), int(tree.parents[request, row])
            parent_rank = int(tree.ranks[request, parent]) if kind == "path" else 0
            value = edges.log_survival[request, depth - 1, parent_rank, tree.ranks[request, row]].exp()
            torch.testing.assert_close(conditional[request, row], value, atol=1e-6, rtol=1e-4)
    assert (survival[:, 0] == 1).all() and (survival[~tree.valid] == 0).all()
    assert (survival <= survival.gather(1, tree.parents)).all()


def test_the_linear_head_prunes_the_draft_s_tree_and_the_path_head_grows_its_own():
    embedding, hidden, anchors, candidates = round_inputs(5)
    trees = {}
    for kind in ("linear", "path"):
        edges = head_edges(prepare_head(random_head(5, kind), [embedding]), candidates, hidden, anchors)
        trees[kind] = build_tree(candidates, anchors, 8, edges).token_ids
    assert torch.equal(trees["linear"], build_tree(candidates, anchors, 8).token_ids)
    assert not torch.equal(trees["path"], trees["linear"])


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_path_head_without_training_says_exactly_what_the_draft_says(exclusive):
    embedding, hidden, anchors, candidates = round_inputs(9)
    zeros, matrix = torch.zeros(WIDTH), torch.zeros(RANK, WIDTH)
    path = PathWeights(torch.ones(RANK, WIDTH), torch.ones(RANK, WIDTH), matrix)
    head = HeadWeights(zeros, zeros, torch.tensor(1.0), torch.tensor(0.0), path, exclusive)
    log_probs = torch.randn(3, 4, 20, generator=torch.Generator().manual_seed(9)).log_softmax(-1)[..., :5]
    candidates = Candidates(candidates.token_ids, log_probs.contiguous(), candidates.horizons)
    edges = head_edges(prepare_head(head, [embedding]), candidates, hidden, anchors)
    torch.testing.assert_close(edges.log_survival[:, 1:], log_probs[:, 1:, None].expand(-1, -1, 5, -1))
    torch.testing.assert_close(edges.log_survival[:, 0, 0], log_probs[:, 0])


def test_odds_of_a_certain_or_an_impossible_candidate_are_no_nan():
    for exclusive in (False, True):
        found = draft_odds(torch.tensor([0.0, -torch.inf]), exclusive)
        assert math.isfinite(found[0]) and found[0] > 10 and found[1] == -torch.inf


def test_exclusive_chances_leave_room_for_none():
    embedding, hidden, anchors, candidates = round_inputs(7)
    head = prepare_head(random_head(7, "path", exclusive=True), embedding.split(4))
    total = head_edges(head, candidates, hidden, anchors).log_survival.exp().sum(-1)
    assert (total < 1).all()


@pytest.mark.parametrize("kind", ["linear", "path"])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_draft_state_proposes_nothing(kind, broken):
    embedding, hidden, anchors, candidates = round_inputs(3)
    hidden[1, 2, 4] = broken
    head = prepare_head(random_head(3, kind, exclusive=True), embedding.split(4))
    values = head_edges(head, candidates, hidden, anchors).log_survival
    assert (values <= 0).all()
    if math.isnan(broken):
        assert (values[1, 2] == -torch.inf).all()


def test_the_draft_s_edges_are_its_marginals_without_a_copy():
    candidates = random_candidates(1, 2, 3, 4)
    assert draft_edges(candidates).log_survival.data_ptr() == candidates.log_probs.data_ptr()


def test_a_looked_up_node_beyond_the_tree_is_impossible():
    candidates = random_candidates(2, 3, 4, 4)
    tree = build_tree(candidates, torch.arange(3), 30)
    conditional = conditional_survival(tree, random_edges(2, candidates, grows=False))
    assert (conditional[:, 0] == 1).all() and (conditional[~tree.valid] == 0).all()
    nothing = Candidates(candidates.token_ids[:, :0], candidates.log_probs[:, :0], candidates.horizons * 0)
    assert conditional_survival(
        build_tree(nothing, torch.arange(3), 4), random_edges(2, nothing, grows=False)
    ).tolist() == [[1, 0, 0, 0]] * 3

