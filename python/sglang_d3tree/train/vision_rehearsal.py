"""Keeps the language tower's text as it was while an adapter teaches it to speak about images.

A row of the original target's own text joins every training step, and the changed tower has to give every token the
distribution that the original gave it. The data of `d3tree data generate` hold both, so the original need not run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_d3tree.train.answers import Conversation
from sglang_d3tree.train.shards import load_shard, shard_paths
from sglang_d3tree.train.tower import rms_norm
from sglang_d3tree.train.vision_align import Teacher
from sglang_d3tree.train.vision_language import Adapter, Language, read, to_words

LONGEST, PLACES = 144, 64
"""Tokens of a row, and places of it that are compared."""


def load_texts(data_dir: Path, held_out: bool) -> list[Conversation]:
    """The conversations of one side of the split.

    Raises FileNotFoundError when there are none.
    """
    texts = [c for path in shard_paths(data_dir) for c in load_shard(path) if c.held_out == held_out]
    if not texts:
        raise FileNotFoundError(f"no text shards in {data_dir}: run `d3tree data generate` first")
    return texts


def rehearse(teacher: Teacher, texts: Sequence[Conversation], step: int) -> Tensor:
    """Mean Kullback-Leibler divergence, original to adapted, at some places of one text."""
    generator = torch.Generator().manual_seed(step)
    text = texts[int(torch.randint(len(texts), (), generator=generator))]
    ids = torch.tensor(text.tokens[:LONGEST])
    places = torch.randperm(len(ids) - 1, generator=generator)[:PLACES]
    lm = teacher.lm
    hidden, _ = read(lm, ids, teacher.adapter)
    with torch.no_grad():
        original = to_words(lm, rms_norm(text.final[places].float(), lm.norm, lm.eps)).log_softmax(-1)
    adapted = to_words(lm, hidden[places]).log_softmax(-1)
    return F.kl_div(adapted, original, log_target=True, reduction="batchmean")


@dataclass(frozen=True)
class Perplexity:
    """Of held-out text, by the original tower and by the adapted one."""

    tokens: int
    original: float
    adapted: float

    @property
    def rise(self) -> float:
        """0.03: three percent above the original's."""
        return self.adapted / self.original - 1


Tower = tuple[Language, Adapter | None]


@torch.no_grad()
def perplexity(original: Tower, adapted: Tower, texts: Sequence[Tensor]) -> Perplexity:
    """Perplexity of token sequences [n] under two states of the language tower."""

    def total(tower: Tower) -> float:
        lm, adapter = tower
        return sum(
            float(F.cross_entropy(to_words(lm, read(lm, ids, adapter)[0][:-1]), ids[1:], reduction="sum"))
            for ids in texts
        )

    tokens = sum(len(ids) - 1 for ids in texts)
    return Perplexity(tokens, math.exp(total(original) / tokens), math.exp(total(adapted) / tokens))
