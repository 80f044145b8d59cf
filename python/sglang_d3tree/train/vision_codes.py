"""Stage 2: find out what to tell the language tower, before the vision tower has to say it.

The frozen language tower reads the image tokens as a bag of vectors. Which vectors make it answer well can be learned
without any pixels: a code book turns a scene's *labels* into 16 vectors (a sum of one entry per label, started from the
words' own embeddings), trained by cross-entropy on the answers. Tables learn in tens of steps what a tower needs
hundreds for, and each step costs a pass through 135M weights. The tower then learns the codes by plain regression.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sglang_d3tree.demo import scenes
from sglang_d3tree.train import vision_data as data

TOKENS = data.GRID**2
_WORDS = {
    "kind": (" background", " shape", " text"),
    "order": tuple(f" {name}" for name in scenes.ORDINALS),
    "color": tuple(f" {name}" for name in data.COLOR_NAMES),
    "shape": tuple(f" {name}" for name in scenes.SHAPES),
    "size": tuple(f" {name}" for name in scenes.SIZES),
    "region": tuple(f" {name}" for name in scenes.REGIONS),
    "text": tuple(f" {name}" for name in data.TEXTS),
}


class CodeBook(nn.Module):
    """Labels -> image tokens. Things and text carry their own labels; the background carries the image's.

    tokens[b, t] = sum over token labels of their entry + background[b, t] * sum over image labels of their entry.
    """

    def __init__(self, embed: Tensor, tokenizer: Any) -> None:
        """embed: [V, H], the language tower's word embeddings."""
        super().__init__()
        hidden = embed.shape[1]
        self.token = nn.ParameterDict()
        for name, words in _WORDS.items():
            ids = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in words]
            self.token[name] = nn.Parameter(0.5 * torch.stack([embed[i].mean(0) for i in ids]))
        self.image = nn.ParameterDict(
            {
                name: nn.Parameter(0.01 * torch.randn(n, classes, hidden))
                for name, (n, classes) in data.IMAGE_CLASSES.items()
            }
        )

    def forward(self, labels: data.Labels) -> Tensor:
        """[B, 16, H]"""
        tokens = torch.zeros(*labels.kind.shape, self.token["kind"].shape[-1])
        for name, table in self.token.items():
            tokens = tokens + _look_up(table, getattr(labels, name))
        background = (labels.kind == 0)[..., None]
        whole = torch.zeros_like(tokens[:, 0])
        for name, table in self.image.items():
            target = getattr(labels, name).view(whole.shape[0], -1)
            for i in range(table.shape[0]):
                whole = whole + _look_up(table[i], target[:, i])
        return tokens + background * whole[:, None]


def _look_up(table: Tensor, index: Tensor) -> Tensor:
    """Rows of the table, zero where the index says there is nothing: [...] -> [..., H]."""
    return table[index.clamp(min=0)] * (index >= 0)[..., None]
