"""Layout of the verify rows and the walk over them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tree_budget import random_survival, trees

from sglang_d3tree.tree.accept import accept_greedy, advance, start_walk
from sglang_d3tree.tree.budget import whole_tree
from sglang_d3tree.tree.build import CandidateTree
from sglang_d3tree.tree.layout import VerifyRows, layout_rows

seeds = st.integers(0, 2**31)


def random_rows(tree: CandidateTree, seed: int, threshold: float, padding: int) -> tuple[VerifyRows, torch.Tensor]:
    keep = whole_tree(tree, random_survival(tree, seed, "smooth"), threshold)
    return layout_rows(tree, keep, int(keep.sum()) + padding), keep


@settings(max_examples=120, deadline=None)
@given(tree=trees, seed=seeds, threshold=st.floats(0, 0.5), padding=st.integers(0, 9))
def test_layout_keeps_every_row_and_its_ancestors(tree, seed, threshold, padding):
    rows, keep = random_rows(tree, seed, threshold, padding)
    flat = 0
    assert rows.num_requests == keep.shape[0]
    for request in range(keep.shape[0]):
        assert rows.row_offsets[request] == flat
        kept = keep[request].nonzero().flatten().tolist()
        for local, tree_row in enumerate(kept):
            assert rows.request[flat] == request and rows.tree_row[flat] == tree_row
            assert rows.token_ids[flat] == tree.token_ids[request, tree_row]
            assert rows.depths[flat] == tree.depths[request, tree_row]
            assert not rows.is_padding[flat]
            path, row = {local}, tree_row
            while row:
                row = int(tree.parents[request, row])
                path.add(kept.index(row))
            assert set(rows.ancestor_mask[flat].nonzero().flatten().tolist()) == path
            parent = kept.index(int(tree.parents[request, tree_row])) if tree_row else local
            assert rows.parent[flat] == flat - local + parent
            flat += 1
    assert rows.row_offsets[-1] == flat
    pad = slice(flat, None)
    assert rows.is_padding[pad].all() and rows.is_padding.sum() == padding
    assert torch.equal(rows.parent[pad], torch.arange(flat, flat + padding))
    assert rows.ancestor_mask[pad].sum(1).tolist() == [1] * padding and rows.ancestor_mask[pad][:, :1].all()
    for field in (rows.token_ids, rows.depths, rows.request, rows.tree_row):
        assert field.dtype == torch.int64 and (field[pad] == 0).all()


def test_layout_needs_room_for_the_anchors():
    tree = CandidateTree(*(torch.zeros(3, 1, dtype=torch.int64),) * 4, torch.zeros(3, 1), torch.ones(3, 1) > 0, 0)
    assert layout_rows(tree, tree.valid, 3).row_offsets.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError):
        layout_rows(tree, tree.valid, 2)


def walk_by_hand(rows: VerifyRows, target_tokens: torch.Tensor, request: int, horizon: int):
    row = int(rows.row_offsets[request])
    emitted, path = [], [row]
    while True:
        token = int(target_tokens[row])
        emitted.append(token)
        children = [
            child
            for child in range(row + 1, int(rows.row_offsets[request + 1]))
            if rows.parent[child] == row and rows.token_ids[child] == token
        ]
        if not children or len(emitted) > horizon:
            return emitted, path
        (row,) = children
        path.append(row)


def target_for(rows: VerifyRows, seed: int) -> torch.Tensor:
    """Next tokens that often follow a kept child: the token of a random kept row, or an arbitrary one."""
    generator = torch.Generator().manual_seed(seed)
    count = rows.token_ids.shape[0]
    target = torch.randint(0, 8, (count,), generator=generator)
    order = torch.randperm(count, generator=generator)
    target[rows.parent[order]] = rows.token_ids[order]
    miss = torch.rand(count, generator=generator) < 0.15
    return target.masked_fill(miss, 999)


@settings(max_examples=150, deadline=None)
@given(tree=trees, seed=seeds, threshold=st.floats(0, 0.2), padding=st.integers(0, 5), longer=st.integers(-2, 2))
def test_greedy_walk(tree, seed, threshold, padding, longer):
    rows, _ = random_rows(tree, seed, threshold, padding)
    target = target_for(rows, seed)
    horizon = max(0, tree.horizon + longer)  # a shorter walk must stop at its own end, not at the tree's
    walk = accept_greedy(rows, target, horizon)
    assert walk.token_ids.shape == walk.path_rows.shape == (rows.num_requests, horizon + 1)
    assert not walk.alive.any()
    for request in range(rows.num_requests):
        emitted, path = walk_by_hand(rows, target, request, horizon)
        length = len(emitted)
        assert walk.accept_lens[request] == length == len(path)
        assert walk.token_ids[request].tolist() == emitted + [0] * (horizon + 1 - length)
        assert walk.path_rows[request].tolist() == path + [path[-1]] * (horizon + 1 - length)
        assert walk.row[request] == path[-1]


@settings(max_examples=60, deadline=None)
@given(tree=trees, seed=seeds, threshold=st.floats(0, 0.2))
def test_stepwise_walk_equals_the_greedy_one(tree, seed, threshold):
    """A sampler draws per request and step; given the same draws both ways end the same, step by step checked."""
    rows, _ = random_rows(tree, seed, threshold, padding=3)
    target = target_for(rows, seed)
    walk = start_walk(rows, tree.horizon)
    for step in range(tree.horizon + 1):
        before = walk
        noise = torch.randint(0, 8, walk.row.shape)  # what a sampler returns for a request that is done is ignored
        walk = advance(rows, walk, torch.where(walk.alive, target[walk.row], noise), step)
        assert torch.equal(walk.accept_lens, before.accept_lens + before.alive)
        assert torch.equal(walk.row[~before.alive], before.row[~before.alive])
        assert (walk.alive <= before.alive).all()
    expected = accept_greedy(rows, target, tree.horizon)
    for name in ("row", "alive", "accept_lens", "token_ids", "path_rows"):
        assert torch.equal(getattr(walk, name), getattr(expected, name)), name


def test_steps_outside_the_walk():
    tree = CandidateTree(*(torch.zeros(1, 1, dtype=torch.int64),) * 4, torch.zeros(1, 1), torch.ones(1, 1) > 0, 0)
    rows = layout_rows(tree, tree.valid, 2)
    walk = start_walk(rows, 3)
    for step in (-1, 4):
        with pytest.raises(ValueError):
            advance(rows, walk, torch.tensor([0]), step)
