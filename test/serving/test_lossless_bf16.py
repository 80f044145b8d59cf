"""In bfloat16 a pass rounds by its number of rows, so greedy text may part from stock's, but only at a near-tie.

The measure of "near" is the target itself: transformers computes the logits after the common prefix in float32 and in
bfloat16 on the same weights. A bfloat16 pass moves each logit by up to ``error`` there. Of two passes that choose
different tokens one chooses against the float32 order, for which two logits of that pass must have moved: their gap in
float32 is at most ``2 * error``. ``error`` is the largest shift among the ten best tokens over the last eight places,
and at least two units in the last place of a bfloat16 logit (2**-7 relative).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import models
from support.calls import complete, output_ids
from support.exact import model_of, tokenizer_of
from support.prompts import Prompt, image_prompts, text_prompts
from support.servers import Server

pytestmark = pytest.mark.timeout(900)

PROMPTS = [*text_prompts()[:6], *image_prompts()[:4]]
LENGTH = 40
FLAGS = ("--model-path", None, "--dtype", "bfloat16", "--max-total-tokens", 9216)


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    """(stock, D3TREE), both in bfloat16."""
    flags = [models.real_target() if flag is None else flag for flag in FLAGS]
    drafter = ("--speculative-algorithm", "d3tree", "--speculative-draft-model-path", models.real_drafter())
    started = [Server(*flags, "--attention-backend", "torch_native"), Server(*flags, *drafter)]
    try:
        yield started[0].wait_until_ready(), started[1].wait_until_ready()
    finally:
        for server in started:
            server.stop()


def logits_after(prompt: Prompt, ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Logits [positions, V] of the target over prompt and answer so far, in float32."""
    target = models.real_target()
    inputs: dict[str, Any] = _processor_inputs(prompt)
    answer = torch.tensor([ids], dtype=torch.int64)
    inputs["input_ids"] = torch.cat([inputs["input_ids"], answer], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if "mm_token_type_ids" in inputs:
        inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(answer)], dim=1)
    with torch.inference_mode():
        return model_of(target, dtype)(**inputs).logits[0].float()


def _processor_inputs(prompt: Prompt) -> dict[str, Any]:
    import base64
    import io

    from PIL import Image
    from transformers import AutoProcessor

    if not prompt.images:
        return dict(tokenizer_of(models.real_target())(prompt.text, return_tensors="pt"))
    pictures = [Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))) for uri in prompt.images]
    processor = AutoProcessor.from_pretrained(models.real_target())
    return dict(processor(text=[prompt.text], images=pictures, return_tensors="pt"))


def explain(prompt: Prompt, common: list[int], ours: int, theirs: int) -> tuple[float, float]:
    """(gap between the two tokens' float32 logits, the gap that bfloat16 rounding can bridge)."""
    exact = logits_after(prompt, common, torch.float32)[-8:]
    rounded = logits_after(prompt, common, torch.bfloat16)[-8:]
    best = exact.topk(10, dim=-1).indices
    shift = (exact - rounded).gather(1, best).abs().max().item()
    error = max(shift, exact[-1].max().abs().item() * 2**-7)
    return abs((exact[-1, ours] - exact[-1, theirs]).item()), 2 * error


def test_every_divergence_is_a_near_tie(servers: tuple[Server, Server]) -> None:
    stock, d3tree = servers
    theirs = output_ids(complete(stock, PROMPTS, concurrency=5, max_new_tokens=LENGTH, ignore_eos=True))
    runs = {
        "alone": output_ids(complete(d3tree, PROMPTS, max_new_tokens=LENGTH, ignore_eos=True)),
        "at once": output_ids(complete(d3tree, PROMPTS, concurrency=5, max_new_tokens=LENGTH, ignore_eos=True)),
    }
    unexplained, agreeing = [], 0
    for name, answers in runs.items():
        for prompt, ours, wanted in zip(PROMPTS, answers, theirs, strict=True):
            assert len(ours) == len(wanted) == LENGTH
            first = next((i for i, pair in enumerate(zip(ours, wanted, strict=True)) if pair[0] != pair[1]), None)
            if first is None:
                agreeing += 1
                continue
            gap, bound = explain(prompt, wanted[:first], ours[first], wanted[first])
            print(f"{prompt.name} ({name}): differs at token {first}, gap {gap:.4f}, bfloat16 can bridge {bound:.4f}")
            if gap > bound:
                unexplained.append((prompt.name, name, first, gap, bound))
    assert not unexplained
    # Near-ties are common in a small model (in 40 tokens, every other answer meets one), not everywhere.
    assert agreeing >= len(runs) * len(PROMPTS) // 4


def test_a_wrong_token_would_not_be_explained() -> None:
    """The bound tells a near-tie from a mistake: the tenth best token is beyond it."""
    prompt = PROMPTS[0]
    exact = logits_after(prompt, [], torch.float32)[-1]
    order = exact.topk(10).indices.tolist()
    gap, bound = explain(prompt, [], order[9], order[0])
    assert gap > bound
