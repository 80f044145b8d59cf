"""The target's answers to the benchmark's requests, recorded in process for replaying."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from sglang_d3tree.demo.workloads import ANSWER_TOKENS, Request
from sglang_d3tree.train.answers import Conversation, Job, answer, load_image_model, prepare_image
from sglang_d3tree.train.prompts import Prompt
from sglang_d3tree.train.tower import LanguageTower


def record_answers(
    tower: LanguageTower, target_dir: Path, requests: Sequence[Request], temperature: float, seed: int = 0
) -> list[Conversation]:
    """One answer per request, as a server would give it: ended by the model, or after ANSWER_TOKENS tokens."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(target_dir)
    model: Any = None
    jobs = []
    for number, request in enumerate(requests):
        text, picture = _parts(request)
        draws = torch.rand(ANSWER_TOKENS, generator=torch.Generator().manual_seed(seed * 1_000_003 + number))
        # The kind is not one of the training prompts'; nobody reads it here.
        prompt = Prompt(text, request.kind, held_out=True)
        image = None
        if picture is None:
            chat = [{"role": "user", "content": text}]
            rendered = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            ids = processor.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        else:
            if model is None:
                model = load_image_model(target_dir)
            ids, image = prepare_image(model, processor, picture, text)
        jobs.append(Job(ids, prompt, temperature, ANSWER_TOKENS, draws, image))
    return answer(tower, jobs, stop_ids=[0, int(processor.tokenizer.eos_token_id)], slots=32)


def _parts(request: Request) -> tuple[str, Image.Image | None]:
    """Text and picture of a request's only message."""
    content = request.messages[0]["content"]
    if isinstance(content, str):
        return content, None
    parts = {part["type"]: part for part in content}
    encoded = parts["image_url"]["image_url"]["url"].split(",", 1)[1]
    return parts["text"]["text"], Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB")
