"""Stage 1: teach the tower to see, without the language model.

Linear heads on the image tokens name what lies under each token and what the image holds as a whole. It costs about a
hundredth of a pass through the language tower per image, so shapes, colours and letters are learned here and the
alignment only has to learn how to say them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_d3tree.demo import scenes
from sglang_d3tree.train import vision_data as data
from sglang_d3tree.train.vision_tower import look, patchify


class Heads(nn.Module):
    """One linear layer per label: on every token, or on the image's mean token."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.token = nn.ModuleDict({name: nn.Linear(hidden, n) for name, n in data.TOKEN_CLASSES.items()})
        self.image = nn.ModuleDict({name: nn.Linear(hidden, n * c) for name, (n, c) in data.IMAGE_CLASSES.items()})

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        """[B, 16, H] -> per label logits [B, 16, classes] or [B, questions, classes]."""
        normed = self.norm(tokens)
        logits = {name: head(normed) for name, head in self.token.items()}
        mean = normed.mean(1)
        for name, (count, classes) in data.IMAGE_CLASSES.items():
            logits[name] = self.image[name](mean).view(-1, count, classes)
        return logits


def head_losses(logits: dict[str, Tensor], labels: data.Labels) -> dict[str, Tensor]:
    """Mean cross-entropy per label name, over the entries that have a label."""
    losses = {}
    for field in fields(data.Labels):
        target = getattr(labels, field.name).flatten()
        flat = logits[field.name].flatten(0, 1)
        summed = F.cross_entropy(flat, target, ignore_index=data.IGNORE, reduction="sum")
        losses[field.name] = summed / (target != data.IGNORE).sum().clamp(min=1)
    return losses


def head_accuracies(logits: dict[str, Tensor], labels: data.Labels) -> dict[str, float]:
    result = {}
    for field in fields(data.Labels):
        target = getattr(labels, field.name).flatten()
        known = target != data.IGNORE
        right = logits[field.name].flatten(0, 1).argmax(-1) == target
        result[field.name] = float(right[known].float().mean()) if known.any() else float("nan")
    return result


@cache
def _easy_train() -> tuple[list[data.EasyImage], data.EasyPixels]:
    """The train split's images of which the questions tell something, with their pixels (0.1 GB, read once)."""
    easy = [image for image in data.easy_vqa("train") if image.shape or image.color]
    return easy, data.load_easy_pixels(easy)


@dataclass
class Images:
    """The mixed image source of both stages; batch `step` is a function of the seed and the step alone."""

    easy: list[data.EasyImage]
    pixels: data.EasyPixels
    seed: int

    @classmethod
    def load(cls, seed: int) -> Images:
        easy, pixels = _easy_train()
        return cls(easy, pixels, seed)

    def scenes(self, step: int, size: int) -> data.SceneBatch:
        source = scenes.scenes(self.seed * 1_000_003 + step, held_out=False)
        return data.scene_batch(source, size, seed=step)

    def easy_indices(self, step: int, size: int) -> list[int]:
        return random.Random(f"easy-{self.seed}-{step}").sample(range(len(self.easy)), size)

    def mixed(self, step: int, size: int) -> tuple[Tensor, data.Labels]:
        """A quarter easy-VQA, the rest scenes, both with noise: uint8 [size, 3, 112, 112]."""
        easy_size = size // 4
        batch = self.scenes(step, size - easy_size)
        rng = random.Random(f"move-{self.seed}-{step}")
        moved, labels = data.easy_batch(self.easy, self.pixels, self.easy_indices(step, easy_size), rng)
        images = data.add_noise(torch.cat([batch.images, moved]), torch.Generator().manual_seed(step))
        return images, data.join([batch.labels, labels])


def pretrain_step(tower: Any, heads: Heads, images: Tensor, labels: data.Labels) -> tuple[Tensor, dict[str, float]]:
    logits = heads(look(tower, patchify(images)))
    losses = head_losses(logits, labels)
    return torch.stack(list(losses.values())).sum(), head_accuracies(logits, labels)
