"""The loss of joint mode is the formula in train/joint.py, term by term."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_d3tree.train import drafter
from sglang_d3tree.train.answers import Conversation
from sglang_d3tree.train.drafter_blocks import ReducedHead, block_loss, make_blocks
from sglang_d3tree.train.drafter_checkpoint import TargetEnds, new_drafter
from sglang_d3tree.train.head_fit import HeadModule
from sglang_d3tree.train.joint import JointOptions, joint_loss, path_weights

V, H, B, K = 20, 32, 4, 14
CONFIG = drafter.DrafterConfig(
    hidden_size=H, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=V,
    rms_norm_eps=1e-5, rope_theta=10000.0, block_size=B, num_target_layers=6, target_layer_ids=(1, 3),
    mask_token_id=1,
)  # fmt: skip
OPTIONS = drafter.TrainOptions(block_size=B, soft=0.0, gamma=2.0)


def made(rank: int, exclusive: bool) -> tuple[Any, HeadModule, Any]:
    """A stand-in for the trainer, a random head, and a batch whose last block runs over the answer's end."""
    rng = torch.Generator().manual_seed(0)
    embedding = 0.3 * torch.randn(V, H, generator=rng)
    trainer = SimpleNamespace(
        options=OPTIONS,
        model=new_drafter(CONFIG, seed=0),
        ends=TargetEnds(embedding, embedding, torch.ones(H), {}),
        head=ReducedHead(embedding, torch.arange(V), sample=0),
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = HeadModule(H, rank, exclusive, 1.0, 1.0)
        for p in module.parameters():
            p.data = 0.2 * torch.randn(p.shape)
    tokens = torch.randint(2, V, (12,), generator=rng).tolist()
    states = torch.randn(12, 2 * H, generator=rng).bfloat16()
    conversation = Conversation(tokens, 3, 0.0, "text", False, states, states[:, :H])
    return trainer, module, make_blocks([conversation], torch.tensor([[4, 7, 10]]), B, 1)


@pytest.mark.parametrize(("rank", "exclusive"), [(0, False), (3, True)])
def test_joint_loss_is_the_formula(rank: int, exclusive: bool) -> None:
    trainer, module, batch = made(rank, exclusive)
    embedding, w = trainer.ends.embedding, module.weights()
    hidden = trainer.model(embedding[batch.block_ids], batch.anchors, batch.target_hidden)[0, :, 1:]
    places = []  # (depth - 1, CE, survival of the reference path, the head's loss)
    for a in range(3):
        parent, path_survival = int(batch.block_ids[0, a, 0]), 1.0
        for d in range(B - 1):
            label = int(batch.labels[0, a, d])
            if label < 0:
                continue
            log_probs = (embedding @ hidden[a, d]).log_softmax(-1)
            best = log_probs.topk(K).indices.tolist()
            scores = {}
            none = 1 - float(log_probs[best].exp().sum().detach())
            for c in best:
                x = log_probs[c] - math.log(none) if w.path is not None else log_probs[c]
                z = w.state @ hidden[a, d] + w.token @ embedding[c] + w.log_prob * x + w.bias
                if w.path is not None:
                    left = w.path.parent @ embedding[parent] + w.path.query @ hidden[a, d]
                    z = z + left @ (w.path.child @ embedding[c])
                scores[c] = float(z.detach())
            if exclusive:
                norm = 1 + sum(math.exp(z) for z in scores.values())
                survival = {c: math.exp(z) / norm for c, z in scores.items()}
                head_loss = -math.log(survival[label]) if label in survival else math.log(norm)
            else:
                survival = {c: 1 / (1 + math.exp(-z)) for c, z in scores.items()}
                head_loss = -sum(math.log(s if c == label else 1 - s) for c, s in survival.items())
            path_survival *= survival.get(label, 0.0)
            places.append((d, -float(log_probs[label].detach()), path_survival, head_loss))
            parent = label
    assert len(places) == 7  # the last block has one label
    likely = sorted(survival for *_, survival, _ in places)[-2:]
    assert 0 < likely[0] < likely[1]
    options = JointOptions(boost=2.0, threshold=sum(likely) / 2, scale=0.3, topk=K)  # one place is kept, six are not
    weights = [math.exp(-d / 2.0) * (3.0 if survival >= options.threshold else 1.0) for d, _, survival, _ in places]
    expected = sum(weight * ce for weight, (_, ce, *_) in zip(weights, places, strict=True)) / sum(weights)
    expected += 0.3 * sum(head_loss for *_, head_loss in places) / len(places)
    loss = joint_loss(trainer, module, batch, options, torch.Generator())
    assert float(loss) == pytest.approx(expected, rel=1e-4)


def test_without_boost_and_head_it_is_the_drafters_own_loss() -> None:
    trainer, module, batch = made(0, False)
    plain = block_loss(trainer.model, trainer.ends, trainer.head, batch, OPTIONS.gamma, torch.Generator())
    none = JointOptions(boost=0.0, scale=0.0, topk=K)
    torch.testing.assert_close(joint_loss(trainer, module, batch, none, torch.Generator()), plain)


def test_the_heads_loss_reaches_drafter_and_head() -> None:
    trainer, module, batch = made(3, True)
    loss = joint_loss(trainer, module, batch, JointOptions(scale=1.0, topk=K), torch.Generator())
    only_drafter = joint_loss(trainer, module, batch, JointOptions(scale=0.0, topk=K), torch.Generator())
    (loss - only_drafter).backward()
    assert trainer.model.norm.weight.grad.abs().max() > 0
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in module.parameters())


def test_weight_rises_where_the_whole_path_is_kept() -> None:
    log_survival = torch.tensor([[0.5, 0.5, 0.5], [0.9, 0.0, 0.9]]).log()
    weights = path_weights(log_survival, gamma=2.0, boost=3.0, threshold=0.25)
    decay = [math.exp(-d / 2.0) for d in range(3)]
    expected = [[4 * decay[0], 4 * decay[1], decay[2]], [4 * decay[0], decay[1], decay[2]]]
    torch.testing.assert_close(weights, torch.tensor(expected))
