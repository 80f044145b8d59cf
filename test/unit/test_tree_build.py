import heapq

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_d3tree.tree.build import CandidateTree, build_tree, chain_tree
from sglang_d3tree.tree.candidates import Candidates
from sglang_d3tree.tree.edges import Edges


def random_candidates(seed: int, requests: int, horizon: int, topk: int, levels: int | None = None) -> Candidates:
    """Candidates with different tokens per depth; with `levels`, log-probabilities are coarse and full of ties."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = topk + 2
    token_ids = torch.rand(requests, horizon, vocabulary, generator=generator).argsort(-1)[..., :topk]
    log_probs = torch.randn(requests, horizon, vocabulary, generator=generator).mul(2).log_softmax(-1)
    log_probs = log_probs.sort(-1, descending=True).values[..., :topk]
    if levels:
        log_probs = (log_probs * levels).round() / levels + 0.0
    horizons = torch.randint(0, horizon + 1, (requests,), generator=generator)
    beyond = torch.arange(horizon) >= horizons[:, None]
    return Candidates(token_ids, log_probs.masked_fill(beyond[..., None], -torch.inf), horizons)


def heap_tree(token_ids: np.ndarray, log_probs: np.ndarray, max_rows: int) -> list[tuple]:
    """DDTree with a heap for one request: pop the best node, push its next sibling and its first child.

    Rows of (token, parent, depth, rank, score) after the anchor.
    """
    horizon, topk = token_ids.shape
    rows: list[tuple] = []
    scores = [np.float32(0)]
    heap: list[tuple] = []

    def push(depth: int, parent: int, rank: int) -> None:
        if depth < horizon and rank < topk and log_probs[depth, rank] > -np.inf:
            score = scores[parent] + log_probs[depth, rank]
            heapq.heappush(heap, (-score, depth, parent, rank))

    push(0, 0, 0)
    while heap and len(rows) < max_rows - 1:
        cost, depth, parent, rank = heapq.heappop(heap)
        rows.append((int(token_ids[depth, rank]), parent, depth + 1, rank, -cost))
        scores.append(-cost)
        push(depth, parent, rank + 1)
        push(depth + 1, len(rows), 0)
    return rows


def random_edges(seed: int, candidates: Candidates, levels: int | None = None, grows: bool = True) -> Edges:
    """Every parent with its own values for its children, in no order; -inf where the draft has no candidate."""
    generator = torch.Generator().manual_seed(seed)
    requests, horizon, topk = candidates.log_probs.shape
    values = -torch.rand(requests, horizon, topk, topk, generator=generator).mul(4).square()
    if levels:
        values = (values * levels / 4).round() * 4 / levels + 0.0
    values[:, :1, 1:] = -torch.inf
    return Edges(values.where(candidates.log_probs.unsqueeze(2) > -torch.inf, -torch.inf), grows)


def best_first_tree(token_ids: np.ndarray, edges: np.ndarray, max_rows: int) -> list[tuple]:
    """Best-first by values [D, K, K] that depend on the parent: pop the best node there is, push all its children."""
    horizon, topk = token_ids.shape
    rows: list[tuple] = []
    heap: list[tuple] = []

    def push_children(depth: int, parent: int, parent_rank: int, score: np.float32) -> None:
        for rank in range(topk if depth < horizon else 0):
            if edges[depth, parent_rank, rank] > -np.inf:
                heapq.heappush(heap, (-(score + edges[depth, parent_rank, rank]), depth, parent, rank))

    push_children(0, 0, 0, np.float32(0))
    while heap and len(rows) < max_rows - 1:
        cost, depth, parent, rank = heapq.heappop(heap)
        rows.append((int(token_ids[depth, rank]), parent, depth + 1, rank, -cost))
        push_children(depth + 1, len(rows), rank, -cost)
    return rows


def valid_rows(tree: CandidateTree, request: int) -> list[tuple]:
    count = int(tree.valid[request].sum())
    fields = (tree.token_ids, tree.parents, tree.depths, tree.ranks, tree.log_scores)
    return list(zip(*(field[request, 1:count].tolist() for field in fields), strict=True))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    requests=st.integers(1, 3),
    horizon=st.integers(1, 6),
    topk=st.integers(1, 6),
    max_rows=st.integers(1, 40),
    levels=st.sampled_from([None, 1, 4]),
)
def test_matches_the_heap(seed, requests, horizon, topk, max_rows, levels):
    candidates = random_candidates(seed, requests, horizon, topk, levels)
    anchors = torch.arange(requests) + 1000
    tree = build_tree(candidates, anchors, max_rows)
    for request in range(requests):
        expected = heap_tree(candidates.token_ids[request].numpy(), candidates.log_probs[request].numpy(), max_rows)
        assert valid_rows(tree, request) == [(*row[:4], float(row[4])) for row in expected]
    assert tree.horizon == horizon
    check_invariants(tree, anchors)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    requests=st.integers(1, 4),
    horizon=st.integers(1, 6),
    topk=st.integers(1, 6),
    max_rows=st.integers(1, 40),
    levels=st.sampled_from([None, 1, 4]),
)
def test_a_beam_per_depth_finds_the_best_first_tree_of_every_parent_s_own_order(
    seed, requests, horizon, topk, max_rows, levels
):
    candidates = random_candidates(seed, requests, horizon, topk)
    edges = random_edges(seed, candidates, levels)
    anchors = torch.arange(requests) + 1000
    tree = build_tree(candidates, anchors, max_rows, edges)
    for request in range(requests):
        expected = best_first_tree(
            candidates.token_ids[request].numpy(), edges.log_survival[request].numpy(), max_rows
        )
        assert valid_rows(tree, request) == [(*row[:4], float(row[4])) for row in expected]
    check_invariants(tree, anchors)


def test_values_that_ignore_the_parent_give_the_draft_s_tree():
    candidates = random_candidates(8, 4, 5, 6)
    copies = Edges(candidates.log_probs.unsqueeze(2).repeat(1, 1, 6, 1), grows=True)
    ours, drafts = (build_tree(candidates, torch.arange(4), 30, edges) for edges in (copies, None))
    for name in ("token_ids", "parents", "depths", "ranks", "log_scores", "valid"):
        assert torch.equal(getattr(ours, name), getattr(drafts, name)), name


def check_invariants(tree: CandidateTree, anchors: torch.Tensor) -> None:
    rows = torch.arange(tree.valid.shape[1])
    assert torch.equal(tree.token_ids[:, 0], anchors)
    assert tree.valid[:, 0].all() and (tree.valid[:, 1:] <= tree.valid[:, :-1]).all()
    is_node = tree.valid & (rows > 0)
    assert (tree.parents < rows)[is_node].all()
    assert torch.equal(tree.depths.gather(1, tree.parents)[is_node] + 1, tree.depths[is_node])
    assert (tree.log_scores <= tree.log_scores.gather(1, tree.parents)).all()
    assert (tree.log_scores[:, 0] == 0).all() and (tree.log_scores[~tree.valid] == -torch.inf).all()
    for field in (tree.parents, tree.depths, tree.ranks):
        assert field.dtype == torch.int64 and (field[~is_node] == 0).all()
    assert (tree.token_ids[~tree.valid] == 0).all()


def test_certain_candidates_keep_parents_before_children():
    """Probability 1 along a path: every node ties with its parent, and depth decides."""
    candidates = Candidates(
        torch.tensor([[[5, 6], [7, 8], [9, 4]]]),
        torch.tensor([[[0.0, -torch.inf]] * 3]),
        torch.tensor([3]),
    )
    tree = build_tree(candidates, torch.tensor([1]), 6)
    assert tree.token_ids.tolist() == [[1, 5, 7, 9, 0, 0]]
    assert tree.parents.tolist() == [[0, 0, 1, 2, 0, 0]]
    check_invariants(tree, torch.tensor([1]))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), horizon=st.integers(1, 6), max_rows=st.integers(1, 10))
def test_chain_is_the_best_candidate_of_every_depth(seed, horizon, max_rows):
    candidates = random_candidates(seed, 2, horizon, 3)
    tree = chain_tree(candidates, torch.tensor([11, 12]), max_rows)
    for request in range(2):
        length = min(int(candidates.horizons[request]), max_rows - 1)
        rows = valid_rows(tree, request)
        assert [row[0] for row in rows] == candidates.token_ids[request, :length, 0].tolist()
        assert [row[1] for row in rows] == list(range(length))
        assert [row[2] for row in rows] == list(range(1, length + 1))


def test_a_block_of_one_drafts_nothing():
    nothing = Candidates(
        torch.zeros(2, 0, 4, dtype=torch.int64), torch.zeros(2, 0, 4), torch.zeros(2, dtype=torch.int64)
    )
    tree = build_tree(nothing, torch.tensor([3, 4]), 5)
    assert tree.token_ids.tolist() == [[3, 0, 0, 0, 0], [4, 0, 0, 0, 0]]
    assert tree.valid.sum() == 2


def test_a_request_does_not_depend_on_its_neighbours():
    candidates = random_candidates(3, 5, 6, 6, levels=2)
    together = build_tree(candidates, torch.arange(5), 20)
    for request in range(5):
        one = slice(request, request + 1)
        alone = Candidates(candidates.token_ids[one], candidates.log_probs[one], candidates.horizons[one])
        tree = build_tree(alone, torch.tensor([request]), 20)
        assert torch.equal(tree.token_ids[0], together.token_ids[request])
        assert torch.equal(tree.log_scores[0], together.log_scores[request])


def test_errors():
    with pytest.raises(ValueError):
        build_tree(random_candidates(0, 1, 2, 2), torch.tensor([0]), 0)
