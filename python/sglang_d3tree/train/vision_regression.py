"""How far the tower's image tokens are from the codes, and the last layer that starts out closest to them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_d3tree.train import vision_data as data
from sglang_d3tree.train.vision_codes import CodeBook
from sglang_d3tree.train.vision_tower import look, patchify

# Squared distance at which an entry of the code book counts as e times less likely than the wanted one, in units of
# half the squared distance. Entries of one label are about 4 apart.
_TEMPERATURE = 0.2
_RIDGE = 1e-3


class CodeError:
    """Squared error as a share of the codes' variance, things, text and background counting alike.

    Most tokens are background, and most of the codes' variance is between kinds: an error measured over everything
    looks small long before shapes and colours come through. ``codes`` are what labels stand for, ``sample`` the labels
    from which the variances are taken.
    """

    def __init__(self, codes: CodeBook, sample: data.Labels) -> None:
        self.codes = codes.requires_grad_(False)
        wanted = codes(sample)
        self._variance = [wanted[sample.kind == kind].var(0).mean() for kind in range(len(data.KINDS))]

    def __call__(self, tokens: Tensor, labels: data.Labels) -> Tensor:
        """tokens [B, 16, H] of images with these labels -> a number; 1 where the tokens are each kind's mean."""
        squares = (tokens - self.codes(labels)).square().mean(-1)
        parts = [
            (squares * (labels.kind == kind)).sum() / (labels.kind == kind).sum().clamp(min=1) / variance
            for kind, variance in enumerate(self._variance)
        ]
        return torch.stack(parts).mean()

    def names(self, tokens: Tensor, labels: data.Labels) -> tuple[Tensor, dict[str, float]]:
        """Cross-entropy of telling each token's labels apart by their entries' distances, and how often that succeeds.

        For one label at a time: what is left of the token when the other labels' entries are taken off.
        """
        wanted = self.codes(labels)
        losses, accuracies = [], {}
        for name, table in self.codes.token.items():
            target = getattr(labels, name)
            known = target >= 0
            entry = table[target.clamp(min=0)]
            rest = (tokens - wanted + entry)[known]
            logits = (rest @ table.T - 0.5 * table.square().sum(-1)) / _TEMPERATURE
            losses.append(F.cross_entropy(logits, target[known]))
            accuracies[name] = float((logits.argmax(-1) == target[known]).float().mean())
        return torch.stack(losses).mean(), accuracies


@torch.no_grad()
def fit_last_layer(tower: Any, codes: CodeBook, batches: Iterable[tuple[Tensor, data.Labels]]) -> None:
    """Set the merger's last layer to the ridge regression from what it reads onto the codes, in closed form.

    Gradient steps from a random layer take hundreds of steps to get where this begins. batches: uint8 images
    [B, 3, 112, 112] with labels; things and text weigh as much as the background.
    """
    layer = tower.merger.mlp[-1]
    width = layer.in_features + 1
    gram = torch.zeros(width, width, dtype=torch.float64)
    moment = torch.zeros(width, layer.out_features, dtype=torch.float64)
    seen: list[Tensor] = []
    hook = layer.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    try:
        for images, labels in batches:
            look(tower, patchify(images))
            x = seen.pop().flatten(0, 1).double()
            x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
            weight = _balance(labels.kind.flatten())
            gram += x.T @ (weight * x)
            moment += x.T @ (weight * codes(labels).flatten(0, 1).double())
    finally:
        hook.remove()
    solution = torch.linalg.solve(gram + _RIDGE * torch.eye(width, dtype=gram.dtype), moment).float()
    layer.weight.copy_(solution[:-1].T)
    layer.bias.copy_(solution[-1])


def _balance(kind: Tensor) -> Tensor:
    """[T, 1] weights that add up to the same for every kind present."""
    counts = torch.bincount(kind, minlength=len(data.KINDS)).clamp(min=1)
    return (len(kind) / counts[kind].double())[:, None]
