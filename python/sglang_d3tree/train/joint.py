"""Joint mode: drafter and tree-size head trained together, from the frozen-mode result (METHOD 3, our reading).

For the block at an anchor let y_1, y_2, ... be the target's own path after it, and s_d the head's conditional survival
of y_d below y_(d-1), 0 where y_d is not among the K candidates. The loss is

    L = sum w_d CE_d / sum w_d + lambda * mean L_head,d
    w_d = exp(-(d - 1) / gamma) * (1 + boost * [s_1 s_2 ... s_d >= threshold])

with CE_d the drafter's loss at depth d, so that the reference path counts more where pruning keeps it, and L_head,d
the head's loss (``head_fit.survival_loss``) on the K candidates below y_(d-1), of which y_d alone is accepted. Weights
w and the head's input log-probabilities are taken as given: the head steers the drafter through its states.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_kernel_ext.reference.head import log_chance
from sglang_d3tree.head_file import HeadFile, load_head, save_head
from sglang_d3tree.train.drafter import Trainer, TrainOptions, save_dflash_checkpoint, train
from sglang_d3tree.train.drafter_blocks import BlockBatch, block_terms, depth_weights
from sglang_d3tree.train.drafter_checkpoint import load_dflash_checkpoint
from sglang_d3tree.train.drafting import draft_answer, load_models
from sglang_d3tree.train.head_fit import HeadModule, child_logits, detached, survival_loss, typical_size
from sglang_d3tree.train.replay import grow, head_or_draft, match_rows, total
from sglang_d3tree.tree.head import prepare_head

log = logging.getLogger(__name__)

COMPARED_ROWS = (8, 16, 32)


@dataclass(frozen=True)
class JointOptions:
    """The formula's constants: ``scale`` is its lambda. topk: candidates per depth, those of the frozen head."""

    boost: float = 1.0
    threshold: float = 0.1
    scale: float = 0.1
    topk: int = 16


def path_weights(log_survival: Tensor, gamma: float, boost: float, threshold: float) -> Tensor:
    """w of the formula, [..., D], from log s_d [..., D] (-inf: not a candidate)."""
    kept = log_survival.cumsum(-1).exp() >= threshold
    return depth_weights(kept, gamma) * (1.0 + boost * kept)


def joint_loss(
    trainer: Trainer, module: HeadModule, batch: BlockBatch, options: JointOptions, rng: torch.Generator
) -> Tensor:
    """L of the formula on one batch of blocks; positions beyond the answer's end do not count."""
    o, ends = trainer.options, trainer.ends
    dtype = getattr(torch, o.dtype)
    terms = block_terms(trainer.model, ends, trainer.head, batch, rng, o.soft, dtype)
    states = terms.hidden.float().flatten(0, 1)  # [n, D, H]
    labels = batch.labels.flatten(0, 1)
    with torch.no_grad():
        logits = F.linear(states.to(dtype), ends.head.to(dtype)).float()
        best = logits.topk(min(options.topk, logits.shape[-1]), dim=-1)
        log_probs = best.values - logits.logsumexp(dim=-1, keepdim=True)
    n, horizon = labels.shape
    parents = torch.cat((batch.block_ids[..., 0].reshape(n, 1), labels[:, :-1].clamp(min=0)), dim=1)
    head = module.weights()
    scores = child_logits(
        head, states, ends.embedding[best.indices], log_probs, ends.embedding[parents],
        torch.arange(horizon).expand(n, horizon),
    )  # fmt: skip
    accepted = best.indices == labels[..., None]
    with torch.no_grad():
        survival = log_chance(scores, head.exclusive).where(accepted, -torch.inf).amax(-1)
    valid = terms.valid.flatten(0, 1)
    weight = path_weights(survival, o.gamma, options.boost, options.threshold)[valid]
    head_loss = survival_loss(scores, accepted, head.exclusive)[valid].mean()
    return (terms.losses * weight).sum() / weight.sum() + options.scale * head_loss


class JointTrainer(Trainer):
    """The drafter's trainer with the formula's loss and the head's parameters, which are averaged as the drafter's."""

    def __init__(
        self,
        target_dir: Path,
        data_dirs: Sequence[Path],
        options: TrainOptions,
        rank: int,
        world: int,
        *,
        start: HeadFile,
        joint: JointOptions,
    ) -> None:
        super().__init__(target_dir, data_dirs, options, rank, world)
        self.joint = joint
        weights = start.weights
        path_rank = 0 if weights.path is None else weights.path.parent.shape[0]
        state_size = typical_size(self.model.norm.weight.detach())  # what a normalised state is multiplied with
        self.survival = HeadModule(
            len(weights.state), path_rank, weights.exclusive, state_size, typical_size(self.ends.embedding)
        )
        self.survival.start_from(weights)
        self.survival_average = copy.deepcopy(self.survival).requires_grad_(False)
        self.optimizer.add_param_group({"params": list(self.survival.parameters()), "weight_decay": 0.0})

    def loss(self, batch: BlockBatch, rng: torch.Generator) -> Tensor:
        return joint_loss(self, self.survival, batch, self.joint, rng)

    @property
    def averages(self) -> list[tuple[nn.Module, nn.Module]]:
        return [*super().averages, (self.survival_average, self.survival)]

    def state(self) -> dict[str, Any]:
        return super().state() | {
            "survival": self.survival.state_dict(),
            "survival_average": self.survival_average.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.survival.load_state_dict(state["survival"])
        self.survival_average.load_state_dict(state["survival_average"])


def accept_lengths(
    target_dir: Path, drafter_dir: Path, kind: str, trainer: Trainer, answers: int = 40
) -> dict[str, float]:
    """Tokens per round of one pair of drafter and head on held-out answers, at equal mean rows per round."""
    models = load_models(target_dir, drafter_dir, getattr(torch, trainer.options.dtype))
    file = load_head(drafter_dir, target_dir, kind)
    assert file is not None
    edges_of = head_or_draft(prepare_head(file.weights, [models.ends.embedding]))
    held_out = [c for c in trainer.held_out if len(c.tokens) > c.prompt_length + 1][:answers]
    grown = [grow(draft_answer(models, c, file.topk), "d3tree", edges_of, 64) for c in held_out]
    found = {}
    for rows in COMPARED_ROWS:
        whole = total(match_rows(grown, "d3tree", rows)[1])
        found[str(rows)] = whole.tokens / whole.rounds
    return found


def train_joint(
    target_dir: Path,
    drafter_dir: Path,
    data_dirs: Sequence[Path],
    out_dir: Path,
    run_dir: Path,
    kind: str,
    options: TrainOptions,
    joint: JointOptions,
) -> dict[str, Any]:
    """Train drafter and head further, write both to ``out_dir``, and compare them with what they started from.

    Raises:
        ValueError: no trained head of this kind beside the drafter, or ``out_dir`` is the drafter's own directory.
    """
    if out_dir.resolve() == drafter_dir.resolve():
        raise ValueError(f"--joint trains another drafter: --out {out_dir} must not be the one it starts from")
    start = load_head(drafter_dir, target_dir, kind)
    assert start is not None
    joint = replace(joint, topk=start.topk)

    def make(target: Path, data: Sequence[Path], o: TrainOptions, rank: int = 0, world: int = 1) -> JointTrainer:
        return JointTrainer(target, data, o, rank, world, start=start, joint=joint)

    for record in train(target_dir, data_dirs, run_dir, options, make=make):
        log.info("validation %s", json.dumps(record))
    trainer = make(target_dir, data_dirs, options)
    trainer.restore(run_dir / "state.pt")
    save_dflash_checkpoint(trainer.average, out_dir)
    weights = detached(trainer.survival_average.weights())
    save_head(out_dir, target_dir, HeadFile(weights, start.topk, {"joint": vars(joint)}))
    found = {
        "rows": list(COMPARED_ROWS),
        "frozen": accept_lengths(target_dir, drafter_dir, kind, trainer),
        "joint": accept_lengths(target_dir, out_dir, kind, trainer),
        "options": vars(joint),
        "steps": trainer.step,
    }
    path = save_head(out_dir, target_dir, HeadFile(weights, start.topk, found))
    path.with_suffix(".json").write_text(json.dumps(found, indent=2) + "\n")
    return found


def continued(drafter_dir: Path, *, seed: int, steps: int, minutes: float, dtype: str) -> TrainOptions:
    """Options for training this drafter further: its shape, its own length of blocks, a low learning rate."""
    config = load_dflash_checkpoint(drafter_dir).config
    return TrainOptions(
        seed=seed,
        layers=config.num_layers,
        block_size=config.block_size,
        steps=steps,
        minutes=minutes,
        dtype=dtype,
        lr=1e-4,
        min_lr=1e-5,
        short_share=0.0,
        start_from=str(drafter_dir),
    )
