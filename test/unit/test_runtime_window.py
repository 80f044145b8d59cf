"""The slots of a round: where verify rows go, and how the accepted path is moved together."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_d3tree.runtime.slots import assign_req_to_token, extend_cache_locs, slot_window
from sglang_d3tree.runtime.window import RoundWindow, committed_moves, write_columns
from sglang_d3tree.tree.accept import accept_greedy
from sglang_d3tree.tree.build import build_tree
from sglang_d3tree.tree.candidates import draft_candidates
from sglang_d3tree.tree.layout import layout_rows


def _round(seed: int, requests: int, max_rows: int, width: int, horizon: int = 5, vocabulary: int = 7):
    """A random round: rows in random ragged trees, and a walk over target tokens that often follows the tree."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(requests, horizon, vocabulary, generator=generator)
    anchors = torch.randint(vocabulary, (requests,), generator=generator)
    tree = build_tree(draft_candidates(logits, 3), anchors, max_rows)
    keep = tree.valid & (torch.arange(max_rows) < torch.randint(1, max_rows + 1, (requests, 1), generator=generator))
    rows = layout_rows(tree, keep, capacity=requests * max_rows)
    target = torch.randint(vocabulary, (requests * max_rows,), generator=generator)
    for row in torch.randperm(requests * max_rows, generator=generator).tolist():
        # Every other row's target token is one of its children's, so that walks go deep.
        if row % 2 and not rows.is_padding[row] and rows.parent[row] != row:
            target[rows.parent[row]] = rows.token_ids[row]
    walk = accept_greedy(rows, target, horizon)
    slots = torch.randperm(requests * width * 2, generator=generator)[: requests * width].view(requests, width)
    return rows, walk, RoundWindow(torch.full((requests,), 11), slots, plan=None)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), requests=st.integers(1, 5), max_rows=st.integers(1, 12))
def test_after_the_moves_the_accepted_path_lies_in_consecutive_slots(seed: int, requests: int, max_rows: int) -> None:
    width = max_rows + 2
    rows, walk, window = _round(seed, requests, max_rows, width)
    flat_slots = window.slots.flatten()
    cache = torch.full((int(flat_slots.max()) + 1,), -1)
    columns = write_columns(rows, width)
    for row, column in enumerate(columns.tolist()):
        if column >= 0:
            cache[flat_slots[column]] = row
    target, source = committed_moves(window, rows, walk)
    cache[flat_slots[target]] = cache[flat_slots[source]]
    for request in range(requests):
        length = int(walk.accept_lens[request])
        assert cache[window.slots[request, :length]].tolist() == walk.path_rows[request, :length].tolist()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), requests=st.integers(1, 5), max_rows=st.integers(1, 12))
def test_no_two_moves_write_one_slot_differently(seed: int, requests: int, max_rows: int) -> None:
    rows, walk, window = _round(seed, requests, max_rows, max_rows)
    moves: dict[int, int] = {}
    for target, source in zip(*(side.tolist() for side in committed_moves(window, rows, walk)), strict=True):
        assert moves.setdefault(target, source) == source


def test_deep_walks_occur_in_these_tests() -> None:
    lengths = torch.cat([_round(seed, 4, 12, 12)[1].accept_lens for seed in range(50)])
    assert int(lengths.max()) >= 4


def test_verify_rows_take_their_own_requests_slots_and_padding_goes_to_the_sink() -> None:
    rows, _, window = _round(3, 4, 6, 9)
    columns = write_columns(rows, window.width)
    assert (columns[rows.is_padding] == -1).all()
    used = columns[~rows.is_padding]
    assert used.unique().numel() == used.numel()
    assert (used // window.width == rows.request[~rows.is_padding]).all()
    assert (columns[rows.row_offsets[:-1]] % window.width == 0).all()


def test_a_window_reads_consecutive_positions_of_the_right_requests() -> None:
    table = torch.arange(60, dtype=torch.int32).view(6, 10)
    window = slot_window(table, torch.tensor([4, 1]), torch.tensor([2, 7]), 3)
    assert window.tolist() == [[42, 43, 44], [17, 18, 19]]
    flat = extend_cache_locs(
        req_pool_indices=torch.tensor([4, 1]),
        req_to_token=table,
        start_offset=torch.tensor([2, 7]),
        end_offset=torch.tensor([5, 10]),
        batch_size=2,
        draft_token_num=3,
        device="cpu",
    )
    assert flat.tolist() == [42, 43, 44, 17, 18, 19]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_new_slots_land_in_their_own_ranges_and_nowhere_else(data: st.DataObject) -> None:
    requests = data.draw(st.integers(1, 4))
    start = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=requests, max_size=requests)))
    count = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=requests, max_size=requests)))
    indices = torch.randperm(6)[:requests]
    table = torch.zeros(6, 12, dtype=torch.int32)
    fresh = torch.arange(100, 100 + int(count.sum()))
    assign_req_to_token(indices, table, start, start + count, fresh, requests)
    expected = torch.zeros_like(table)
    taken = 0
    for row, first, length in zip(indices.tolist(), start.tolist(), count.tolist(), strict=True):
        expected[row, first : first + length] = fresh[taken : taken + length]
        taken += length
    assert torch.equal(table, expected)
