"""Labels of the tree-size head: the target's verdict at every node of whole candidate trees, and what is made of it."""

from __future__ import annotations

import pytest
import torch

from sglang_d3tree.demo.target import build_tiny_target
from sglang_d3tree.train.answers import ImagePrompt
from sglang_d3tree.train.head_data import HeadData, accepted_rows, labelled_parents
from sglang_d3tree.train.tower import LanguageTower
from sglang_d3tree.train.tree_verify import prefill, verify_trees
from sglang_d3tree.tree.build import CandidateTree, build_tree
from sglang_d3tree.tree.candidates import draft_candidates

HORIZON, TOPK, ROWS = 3, 4, 14


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> LanguageTower:
    return LanguageTower(build_tiny_target(tmp_path_factory.mktemp("tiny") / "target", vocab_size=64, seed=1))


def random_trees(count: int, anchors: torch.Tensor) -> CandidateTree:
    rng = torch.Generator().manual_seed(5)
    logits = 2.0 * torch.randn(count, HORIZON, 64, generator=rng)
    return build_tree(draft_candidates(logits, TOPK), anchors, ROWS)


def path_of(tree: CandidateTree, request: int, row: int) -> list[int]:
    """Tokens from the anchor to the row."""
    path = [int(tree.token_ids[request, row])]
    while row:
        row = int(tree.parents[request, row])
        path.insert(0, int(tree.token_ids[request, row]))
    return path


@pytest.mark.parametrize("with_image", [False, True])
def test_one_masked_pass_says_what_every_path_says_alone(tower: LanguageTower, with_image: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(17, 64, (20,), generator=rng)
    image = None
    if with_image:
        # Six image tokens that take three positions: later tokens stand three positions earlier.
        embeds = torch.randn(12, tower.dims.hidden_size, generator=rng)
        grid = torch.tensor([[2, 2, 2, 2, 2, 2], [2, 2, 3, 3, 4, 4], [2, 3, 2, 3, 2, 3]])
        positions = torch.cat([torch.arange(2).repeat(3, 1), grid, torch.arange(5, 9).repeat(3, 1)], dim=1)
        image = ImagePrompt(embeds, positions)
        assert image.offset == -3
    places = torch.tensor([12, 15, 18])
    tree = random_trees(3, tokens[places])
    cache = prefill(tower, tokens, image)
    together = verify_trees(tower, cache, tree, places, image.offset if image else 0)
    offset = image.offset if image else 0
    assert tree.valid.all()
    for request, place in enumerate(places.tolist()):
        for row in range(ROWS):
            ids = torch.cat([tokens[:place], torch.tensor(path_of(tree, request, row))])
            embeds, positions = tower.embedding[ids], (torch.arange(len(ids)) + offset).repeat(3, 1)
            if image:
                embeds[:12], positions[:, :12] = image.embeds, image.positions
            own = tower.new_cache(1, len(ids))
            start = torch.zeros(1, dtype=torch.long)
            alone, _ = tower.forward(embeds[None], start, own, slice(0, 1), positions[:, None])
            torch.testing.assert_close(together[request, row], alone[0, -1], rtol=1e-4, atol=1e-4)


def hand_made() -> HeadData:
    """One draft. Tree: anchor 9 with children 1 and 2; 1 has 3, 2 has 4. The target says 1, then 5; below 2 it says 4.

    The recorded answer is 9 1 5: greedy to its end, and 5 is no row of the tree.
    """
    return HeadData(
        states=torch.zeros(1, 3, 2, dtype=torch.bfloat16),
        token_ids=torch.tensor([[[1, 2], [3, 4], [6, 7]]], dtype=torch.int32),
        log_probs=torch.zeros(1, 3, 2),
        conversation=torch.zeros(1, dtype=torch.int32),
        kind=torch.zeros(1, dtype=torch.int32),
        tree_tokens=torch.tensor([[9, 1, 2, 3, 4]], dtype=torch.int32),
        tree_parents=torch.tensor([[0, 0, 0, 1, 2]], dtype=torch.int32),
        tree_depths=torch.tensor([[0, 1, 1, 2, 2]], dtype=torch.int32),
        tree_ranks=torch.tensor([[0, 0, 1, 0, 1]], dtype=torch.int32),
        tree_valid=torch.ones(1, 5, dtype=torch.bool),
        tree_targets=torch.tensor([[1, 5, 4, 6, 7]], dtype=torch.int32),
        path_tokens=torch.tensor([[9, 1, 5]], dtype=torch.int32),
        path_targets=torch.tensor([[1, 5, 8]], dtype=torch.int32),
        path_valid=torch.ones(1, 3, dtype=torch.bool),
    )


def test_labels_are_conditional_and_rejected_parents_have_labelled_children() -> None:
    from sglang_d3tree.train.head_fit import make_batch

    data = hand_made()
    assert accepted_rows(data).tolist() == [[True, True, False, False, False]]
    found = labelled_parents(data)
    # Every tree row, then of the reference path only what the tree lacks: token 5 at depth 2.
    assert found.valid.tolist() == [[True] * 5 + [False, False, True]]
    assert found.accepted[found.valid].tolist() == [True, True, False, False, False, True]
    batch = make_batch(data, torch.zeros(10, 2), rejected=0.5)
    labels = batch.accepted[0]
    assert labels[0].tolist() == [True, False]  # below the anchor: 1 of {1, 2}
    assert labels[1].tolist() == [False, False]  # below 1 the target says 5, which is no candidate
    assert labels[2].tolist() == [False, True]  # below the rejected 2 it says 4
    assert labels[3].tolist() == [True, False]  # below 3: 6 of {6, 7}
    assert batch.weight.tolist() == [[1, 1, 0.5, 0.5, 0.5, 0, 0, 1]]


def test_a_sampled_path_labels_but_is_accepted_only_as_far_as_it_is_greedy() -> None:
    data = hand_made()
    data.tree_valid.fill_(False)
    data.path_tokens[0, 1] = 2  # the recorded sample: the target's argmax was 1
    found = labelled_parents(data)
    assert found.valid.tolist() == [[False] * 5 + [True] * 3]
    assert found.accepted[found.valid].tolist() == [True, False, False]
    assert not accepted_rows(data).any()
