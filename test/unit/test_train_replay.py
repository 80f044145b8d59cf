"""Replayed rounds: which rows a policy keeps, what is accepted, and how rows and tokens are counted."""

from __future__ import annotations

import pytest
import torch

from sglang_d3tree.train.drafter_validation import tree_accept_length
from sglang_d3tree.train.replay import (
    Grown,
    Replayed,
    accepted_nodes,
    answer_drafts,
    grow,
    head_or_draft,
    kept_rows,
    match_rows,
    replay,
    total,
)
from sglang_d3tree.tree.accept import accept_greedy
from sglang_d3tree.tree.build import build_tree
from sglang_d3tree.tree.candidates import draft_candidates
from sglang_d3tree.tree.head import HeadWeights, PathWeights, prepare_head
from sglang_d3tree.tree.layout import layout_rows

V, H, D, K, ROWS = 12, 6, 4, 4, 24


def drafts_of(length: int, seed: int):  # type: ignore[no-untyped-def]
    """A random answer and drafts that like its tokens, so that paths are accepted."""
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(V, (length + 1,), generator=rng)
    logits = torch.randn(length, D, V, generator=rng)
    for a in range(length):
        for d in range(min(D, length - a)):
            logits[a, d, tokens[a + 1 + d]] += 1.5
    states = torch.randn(length, D, H, generator=rng)
    return answer_drafts(tokens, states, draft_candidates(logits, K))


def test_the_continuation_is_what_follows_each_place() -> None:
    states, candidates = torch.zeros(3, 2, H), draft_candidates(torch.randn(3, 2, V), K)
    drafts = answer_drafts(torch.tensor([7, 8, 9, 1]), states, candidates)
    assert drafts.anchors.tolist() == [7, 8, 9]
    assert drafts.continuation.tolist() == [[8, 9], [9, 1], [1, -1]]


def test_accepted_nodes_are_those_that_the_servers_walk_commits() -> None:
    drafts = drafts_of(9, seed=1)
    tree = build_tree(drafts.candidates, drafts.anchors, ROWS)
    accepted = accepted_nodes(tree, drafts.continuation)
    rows = layout_rows(tree, tree.valid, 9 * ROWS)
    # What the target says after a row is read by depth: wrong below rejected rows, but no walk gets there.
    says = torch.nn.functional.pad(drafts.continuation, (0, 1), value=-1)[rows.request, rows.depths]
    walk = accept_greedy(rows, says, D)
    assert accepted.sum(1).tolist() == walk.accept_lens.tolist()
    assert int(accepted.sum()) > 9


@pytest.mark.parametrize("rows", [2, 5, 12])
def test_ddtree_rounds_are_those_of_the_training_curve(rows: int) -> None:
    drafts = drafts_of(30, seed=2)
    grown = grow(drafts, "ddtree", head_or_draft(None), ROWS)
    log_probs, ids = drafts.candidates.log_probs.tolist(), drafts.candidates.token_ids.tolist()
    truth = drafts.continuation.tolist()
    inside = torch.arange(grown.accepted.shape[1]) < kept_rows(grown, "ddtree", rows)[:, None]
    lengths = (grown.accepted & inside).sum(1).tolist()
    assert lengths == [tree_accept_length(p, i, t, rows - 1) for p, i, t in zip(log_probs, ids, truth, strict=True)]


def test_rounds_and_rows_are_counted_where_the_walk_comes_by() -> None:
    accepted = torch.tensor([[True, True, False], [True, False, False], [True, False, True], [True, False, False]])
    grown = Grown(torch.tensor([[1.0, 0.5, 0.2]] * 4), accepted, torch.ones(4, 3, dtype=torch.bool))
    # Two rows everywhere: place 0 accepts one node and goes to 2, whose hit is outside; then 3.
    assert replay(grown, torch.tensor([2, 2, 2, 2])) == Replayed(tokens=4, rounds=3, rows=6)
    # A third row at place 2 ends the answer there; the row of place 1 is never verified.
    assert replay(grown, torch.tensor([2, 3, 3, 1])) == Replayed(tokens=4, rounds=2, rows=5)
    assert replay(grown, torch.ones(4, dtype=torch.long)) == Replayed(tokens=4, rounds=4, rows=4)


def test_kept_rows_by_hand() -> None:
    valid = torch.tensor([[True, True, True, True], [True, True, False, False]])
    grown = Grown(torch.tensor([[1.0, 0.6, 0.3, 0.1], [1.0, 0.9, 0.0, 0.0]]), torch.zeros_like(valid), valid)
    assert kept_rows(grown, "ddtree", 3).tolist() == [3, 2]
    assert kept_rows(grown, "d3tree", 0.3).tolist() == [3, 2]
    assert kept_rows(grown, "d3tree", 1.5).tolist() == [1, 1]
    # (1 + sum) / (1 + limit n): free rows are all taken; at limit 1 of [1, 1.6, 1.9, 2.0] / [2, 3, 4, 5] the second.
    assert kept_rows(grown, "caddtree", 0.0).tolist() == [4, 2]
    assert kept_rows(grown, "caddtree", 1.0).tolist() == [2, 2]
    assert kept_rows(grown, "caddtree", 10.0).tolist() == [1, 1]


@pytest.mark.parametrize("policy", ["caddtree", "d3tree"])
def test_matched_rows_stay_within_the_mean_and_come_close(policy: str) -> None:
    grown = [grow(drafts_of(60, seed), policy, head_or_draft(None), ROWS) for seed in range(4)]
    for rows in (3, 8):
        _, replays = match_rows(grown, policy, rows)
        whole = total(replays)
        assert 0.93 * rows <= whole.rows / whole.rounds <= rows
        assert whole.tokens == 240


def test_a_head_that_knows_the_answer_grows_trees_that_accept_more() -> None:
    """Embeddings are one-hot and the answer counts upwards: the path term can say which child follows which parent."""
    length, identity = 24, torch.eye(V)
    tokens = torch.arange(length + 1) % V
    drafts = answer_drafts(tokens, torch.zeros(length, D, V), draft_candidates(torch.randn(length, D, V), V))
    successor = torch.roll(identity, 1, dims=0)  # [r, V]: of token u the entry u + 1
    path = PathWeights(8 * successor, torch.zeros(V, V), identity)
    head = HeadWeights(torch.zeros(V), torch.zeros(V), torch.tensor(0.1), torch.tensor(-4.0), path, True)
    table = prepare_head(head, [identity])
    by_head = grow(drafts, "d3tree", head_or_draft(table), ROWS)
    by_draft = grow(drafts, "d3tree", head_or_draft(None), ROWS)
    lengths = [
        total(match_rows([g], "d3tree", 6)[1]).tokens / total(match_rows([g], "d3tree", 6)[1]).rounds
        for g in (by_head, by_draft)
    ]
    assert lengths[0] > lengths[1] + 1
