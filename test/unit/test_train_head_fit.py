"""The head's loss and its numbers: the formulas, and that training computes what serving does."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from sgl_kernel_ext.reference.head import log_chance
from sglang_d3tree.train.head_fit import HeadModule, child_logits, survival_loss
from sglang_d3tree.train.head_report import auc, expected_calibration_error, reliability
from sglang_d3tree.tree.candidates import draft_candidates
from sglang_d3tree.tree.head import HeadWeights, PathWeights, head_edges, prepare_head

H, V, D, K = 8, 30, 3, 4


def random_head(kind: str, exclusive: bool) -> HeadWeights:
    rng = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(shape, generator=rng)

    path = PathWeights(draw(3, H), draw(3, H), draw(3, H)) if kind == "path" else None
    return HeadWeights(draw(H), draw(H), torch.tensor(0.7), torch.tensor(-0.3), path, exclusive)


@pytest.mark.parametrize(("kind", "exclusive"), list(itertools.product(("linear", "path"), (False, True))))
def test_training_predicts_what_serving_predicts(kind: str, exclusive: bool) -> None:
    """The loss of a parent's children is the negative log-likelihood of serving's edges."""
    head, rng = random_head(kind, exclusive), torch.Generator().manual_seed(2)
    embedding, states = torch.randn(V, H, generator=rng), torch.randn(2, D, H, generator=rng)
    candidates = draft_candidates(torch.randn(2, D, V, generator=rng), K)
    anchors = torch.tensor([5, 6])
    edges = head_edges(prepare_head(head, [embedding]), candidates, states, anchors).log_survival
    # Parents: the anchor, and every candidate of depths 1 and 2.
    parents = torch.cat((anchors[:, None], candidates.token_ids[:, :-1].flatten(1)), 1)
    depths = torch.tensor([0] + [1] * K + [2] * K).expand(2, -1)
    logits = child_logits(
        head, states, embedding[candidates.token_ids], candidates.log_probs, embedding[parents], depths
    )
    accepted = torch.zeros(logits.shape, dtype=torch.bool)
    accepted[:, ::2, 1] = True  # of every second parent the second child, of the others none
    losses = survival_loss(logits, accepted, exclusive)
    for r, m in itertools.product(range(2), range(1 + 2 * K)):
        depth = int(depths[r, m])
        row = 0 if depth == 0 or kind == "linear" else (m - 1) % K
        chance = edges[r, depth, row].exp().double()
        if exclusive:
            expected = -chance[1].log() if m % 2 == 0 else -(1 - chance.sum()).log()
        else:
            expected = -(1 - chance).log().sum()
            expected += (1 - chance[1]).log() - chance[1].log() if m % 2 == 0 else 0.0
        assert float(losses[r, m]) == pytest.approx(float(expected), rel=1e-4)


def test_binary_loss_is_the_cross_entropy_of_every_child() -> None:
    logits, accepted = torch.tensor([[1.5, -2.0]]), torch.tensor([[True, False]])
    expected = math.log(1 + math.exp(-1.5)) + math.log(1 + math.exp(-2.0))
    assert float(survival_loss(logits, accepted, False)) == pytest.approx(expected)


def test_module_has_the_published_number_of_parameters_and_keeps_a_head() -> None:
    linear = HeadModule(H, 0, False, 2.0, 0.1)
    assert sum(p.numel() for p in linear.parameters()) == 2 * H + 2 == linear.weights().num_parameters
    for kind, rank in (("linear", 0), ("path", 3)):
        head = random_head(kind, True)
        module = HeadModule(H, rank, True, 2.0, 0.1)
        module.start_from(head)
        back = module.weights()
        torch.testing.assert_close(back.state, head.state)
        torch.testing.assert_close(back.token, head.token)
        if head.path is not None and back.path is not None:
            torch.testing.assert_close(back.path.query, head.path.query)
            torch.testing.assert_close(back.path.child, head.path.child)


def test_a_new_module_trusts_the_draft_and_its_path_term_can_learn() -> None:
    module = HeadModule(H, 3, False, 1.0, 1.0)
    states, children, log_probs = torch.randn(1, D, H), torch.randn(1, D, K, H), -torch.rand(1, D, K) - 0.1
    depths = torch.tensor([[0, 2]])
    logits = child_logits(module.weights(), states, children, log_probs, torch.randn(1, 2, H), depths)
    torch.testing.assert_close(log_chance(logits, False), log_probs[:, [0, 2]])
    survival_loss(logits, torch.zeros(1, 2, K, dtype=torch.bool), False).sum().backward()
    assert module.child is not None and module.child.grad is not None and module.child.grad.abs().max() > 0


def test_auc_counts_pairs() -> None:
    rng = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 6, (60,), generator=rng).float()  # with ties
    labels = torch.rand(60, generator=rng) < 0.3
    pairs = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for a in scores[labels].tolist()
        for b in scores[~labels].tolist()
    ]
    assert auc(scores, labels) == pytest.approx(sum(pairs) / len(pairs))
    assert auc(labels.float(), labels) == 1.0
    assert math.isnan(auc(scores, torch.ones(60, dtype=torch.bool)))


def test_calibration_error_by_hand() -> None:
    predicted = torch.tensor([0.1, 0.1, 0.9, 0.9])
    bins = reliability(predicted, torch.tensor([False, False, True, False]), bins=2)
    assert [(b.share, b.accepted) for b in bins] == [(0.5, 0.0), (0.5, 0.5)]
    assert expected_calibration_error(bins) == pytest.approx(0.5 * 0.1 + 0.5 * 0.4)
    rng = torch.Generator().manual_seed(1)
    honest = torch.rand(20_000, generator=rng)
    outcome = torch.rand(20_000, generator=rng) < honest
    assert expected_calibration_error(reliability(honest, outcome)) < 0.02
    assert expected_calibration_error(reliability(honest**3, outcome)) > 0.15


def test_bce_of_torch_agrees() -> None:
    rng = torch.Generator().manual_seed(3)
    logits, accepted = torch.randn(5, K, generator=rng), torch.rand(5, K, generator=rng) < 0.5
    expected = F.binary_cross_entropy(logits.sigmoid(), accepted.float(), reduction="none").sum(1)
    torch.testing.assert_close(survival_loss(logits, accepted, False), expected)
