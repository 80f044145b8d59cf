"""What the target itself says, computed by transformers from the same checkpoint: greedy text and distributions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch


@cache
def model_of(target: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import Qwen2_5_VLForConditionalGeneration

    return Qwen2_5_VLForConditionalGeneration.from_pretrained(target, dtype=dtype).eval()


@cache
def tokenizer_of(target: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target)


@torch.inference_mode()
def greedy_ids(target: Path, prompt_ids: list[int], count: int) -> list[int]:
    """The target's greedy continuation of a text prompt, no end token looked at."""
    model, ids = model_of(target), torch.tensor([prompt_ids])
    for _ in range(count):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids[0, len(prompt_ids) :].tolist()


@torch.inference_mode()
def triple_distribution(
    target: Path, prompt_ids: list[int], filter_probs: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Probability of every continuation of three tokens, [V, V, V] float64.

    filter_probs maps [*, V] next-token probabilities to what is sampled from (top-p and the like), normalised.
    """
    model = model_of(target)

    def next_probs(contexts: torch.Tensor) -> torch.Tensor:
        logits = torch.cat([model(input_ids=part).logits[:, -1] for part in contexts.split(512)])
        return filter_probs(logits.double().softmax(-1))

    prompt = torch.tensor([prompt_ids])
    first = next_probs(prompt)[0]
    vocabulary = torch.arange(first.numel())
    one = torch.cat([prompt.expand(vocabulary.numel(), -1), vocabulary[:, None]], dim=1)
    second = next_probs(one)
    two = torch.cat([one.repeat_interleave(vocabulary.numel(), 0), vocabulary.repeat(vocabulary.numel())[:, None]], 1)
    third = next_probs(two).view(vocabulary.numel(), vocabulary.numel(), -1)
    return first[:, None, None] * second[:, :, None] * third


def no_filter(probs: torch.Tensor) -> torch.Tensor:
    return probs


def top_k(k: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Keep the k most probable tokens."""

    def keep(probs: torch.Tensor) -> torch.Tensor:
        smallest = probs.topk(k, dim=-1).values[..., -1:]
        return _normalised(probs.where(probs >= smallest, 0.0))

    return keep


def top_p(p: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Keep the fewest most probable tokens whose probabilities sum to at least p."""

    def keep(probs: torch.Tensor) -> torch.Tensor:
        ordered, index = probs.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        kept = ordered.where(before < p, 0.0)
        return _normalised(torch.zeros_like(probs).scatter(-1, index, kept))

    return keep


def min_p(share: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Keep the tokens at least ``share`` as probable as the most probable one."""

    def keep(probs: torch.Tensor) -> torch.Tensor:
        return _normalised(probs.where(probs >= share * probs.amax(-1, keepdim=True), 0.0))

    return keep


def _normalised(probs: torch.Tensor) -> torch.Tensor:
    return probs / probs.sum(-1, keepdim=True)
