"""The drafter's blocks: what they may see, what they are asked, and how trees are scored."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from sglang_d3tree.train import drafter
from sglang_d3tree.train.answers import Conversation
from sglang_d3tree.train.drafter_blocks import ReducedHead, anchor_range, block_loss, make_blocks
from sglang_d3tree.train.drafter_checkpoint import TargetEnds, new_drafter
from sglang_d3tree.train.drafter_validation import tree_accept_length

CONFIG = drafter.DrafterConfig(
    hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=50,
    rms_norm_eps=1e-5, rope_theta=10000.0, block_size=4, num_target_layers=6, target_layer_ids=(1, 3),
    mask_token_id=16,
)  # fmt: skip


@pytest.fixture
def model() -> drafter.DrafterModel:
    return new_drafter(CONFIG, seed=0)


def random_conversation(length: int, prompt: int, seed: int) -> Conversation:
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(17, 50, (length,), generator=rng).tolist()
    hidden, final = torch.randn(length, 64, generator=rng), torch.randn(length, 32, generator=rng)
    return Conversation(tokens, prompt, 0.0, "text", False, hidden.bfloat16(), final.bfloat16())


def test_block_sees_no_target_state_at_or_after_its_anchor(model: drafter.DrafterModel) -> None:
    states, embeds = torch.randn(1, 12, 64), torch.randn(1, 2, 4, 32)
    anchors = torch.tensor([[5, 9]])
    with torch.no_grad():
        before = model(embeds, anchors, states)
        later = states.clone()
        later[:, 5:] += 10
        after = model(embeds, anchors, later)
        assert torch.equal(before[:, 0], after[:, 0])  # positions 5.. are invisible to the block anchored at 5
        assert not torch.allclose(before[:, 1], after[:, 1])
        earlier = states.clone()
        earlier[:, 4] += 10
        assert not torch.allclose(before[:, 0], model(embeds, anchors, earlier)[:, 0])


def test_blocks_of_one_pass_do_not_see_each_other(model: drafter.DrafterModel) -> None:
    states, embeds = torch.randn(2, 12, 64), torch.randn(2, 3, 4, 32)
    anchors = torch.tensor([[3, 6, 11], [4, 8, 10]])
    with torch.no_grad():
        together = model(embeds, anchors, states)
        for s, a in itertools.product(range(2), range(3)):
            end = int(anchors[s, a])
            alone = model(embeds[s : s + 1, a : a + 1], anchors[s : s + 1, a : a + 1], states[s : s + 1, :end])
            torch.testing.assert_close(alone[0, 0], together[s, a], rtol=1e-4, atol=1e-5)


def test_block_attends_both_ways(model: drafter.DrafterModel) -> None:
    states, embeds, anchors = torch.randn(1, 5, 64), torch.randn(1, 1, 4, 32), torch.tensor([[5]])
    changed = embeds.clone()
    changed[..., 3, :] += 1
    with torch.no_grad():
        assert not torch.allclose(model(embeds, anchors, states)[..., 0, :], model(changed, anchors, states)[..., 0, :])


def test_labels_are_the_next_tokens_and_end_with_the_answer() -> None:
    c = random_conversation(10, 4, seed=1)
    assert list(anchor_range(c)) == [4, 5, 6, 7, 8]
    batch = make_blocks([c], torch.tensor([[4, 8]]), 4, 16)
    assert batch.block_ids.tolist() == [[[c.tokens[4], 16, 16, 16], [c.tokens[8], 16, 16, 16]]]
    assert batch.labels.tolist() == [[c.tokens[5:8], [c.tokens[9], -1, -1]]]
    assert batch.target_hidden.shape == (1, 8, 64)  # nothing at or after the last anchor
    assert torch.equal(batch.target_hidden[0], c.hidden[:8].float())
    assert torch.equal(batch.teacher[0, 0], c.final[4:7].float())  # the states that predict tokens 5, 6, 7


def test_padding_labels_carry_no_loss(model: drafter.DrafterModel) -> None:
    c, embedding = random_conversation(10, 4, seed=1), torch.randn(50, 32)
    ends = TargetEnds(embedding, embedding, torch.ones(32), {})
    head = ReducedHead(embedding, torch.arange(50), sample=0)
    rng = torch.Generator()
    batch = make_blocks([c], torch.tensor([[8]]), 4, 16)
    loss = block_loss(model, ends, head, batch, 4.0, rng)
    hidden = model(embedding[batch.block_ids], batch.anchors, batch.target_hidden)
    expected = F.cross_entropy(F.linear(hidden[0, 0, 1:2], embedding), torch.tensor([c.tokens[9]]))
    torch.testing.assert_close(loss, expected)


def test_reduced_head_equals_the_full_one_when_it_covers_the_vocabulary() -> None:
    weight, hidden, labels = torch.randn(50, 32), torch.randn(6, 32), torch.tensor([1, 40, 40, 3, 49, 0])
    full = F.cross_entropy(F.linear(hidden, weight), labels, reduction="none")
    order = torch.randperm(50)
    covered = ReducedHead(weight, order, sample=4).cross_entropy(hidden, labels, torch.Generator())
    torch.testing.assert_close(covered, full)


def test_reduced_head_estimates_the_full_partition_function() -> None:
    weight, hidden, labels = 0.1 * torch.randn(400, 32), torch.randn(8, 32), torch.arange(8)
    full = F.cross_entropy(F.linear(hidden, weight), labels, reduction="none")
    head = ReducedHead(weight, torch.arange(40), sample=60)
    rng = torch.Generator().manual_seed(0)
    mean = torch.stack([head.cross_entropy(hidden, labels, rng).exp() for _ in range(500)]).mean(dim=0)
    torch.testing.assert_close(mean, full.exp(), rtol=0.02, atol=0.0)


def test_soft_labels_pull_towards_the_target_distribution() -> None:
    """With soft labels alone, the loss is least where drafter and target agree, and there it is the entropy."""
    weight, teacher, labels = torch.randn(50, 32), torch.randn(6, 32), torch.arange(6)
    head, rng = ReducedHead(weight, torch.arange(50), sample=0), torch.Generator()
    hidden = teacher.clone().requires_grad_(True)
    loss = head.cross_entropy(hidden, labels, rng, teacher, 1.0)
    entropy = torch.distributions.Categorical(logits=F.linear(teacher, weight)).entropy()
    torch.testing.assert_close(loss.detach(), entropy)
    (gradient,) = torch.autograd.grad(loss.sum(), hidden)
    assert float(gradient.abs().max()) < 1e-4
    hard = head.cross_entropy(teacher, labels, rng)
    mixed = head.cross_entropy(teacher, labels, rng, teacher, 0.25)
    torch.testing.assert_close(mixed, 0.75 * hard + 0.25 * entropy)


def test_tree_accept_length_against_enumeration() -> None:
    """Best-first keeps the highest-scoring paths: compare with sorting all of them."""
    rng = torch.Generator().manual_seed(2)
    for nodes in (1, 3, 7, 12):
        for _ in range(30):
            log_probs = torch.log_softmax(torch.randn(3, 5, generator=rng) * 2, -1).sort(-1, descending=True).values
            truth = torch.randint(0, 5, (3,), generator=rng).tolist()  # candidate r of depth d carries token r
            paths = [p for d in (1, 2, 3) for p in itertools.product(range(5), repeat=d)]
            scores = {p: sum(float(log_probs[d, r]) for d, r in enumerate(p)) for p in paths}
            kept = set(sorted(paths, key=lambda p: -scores[p])[:nodes])
            expected = 1 + max((d for d in (1, 2, 3) if tuple(truth[:d]) in kept), default=0)
            ids = [list(range(5))] * 3
            assert tree_accept_length(log_probs.tolist(), ids, truth, nodes) == expected


def test_learning_rate_and_block_sizes_follow_the_schedule() -> None:
    options = drafter.TrainOptions(block_size=8, short_share=0.5)
    rng = torch.Generator().manual_seed(0)
    assert {drafter.draw_block_size(options, 0.1, rng) for _ in range(20)} == {4}
    late = [drafter.draw_block_size(options, 0.9, rng) for _ in range(400)]
    assert set(late) == set(range(4, 11))
    assert late.count(8) > 250
    assert math.isclose(sum(late) / len(late), 8, rel_tol=0.1)
