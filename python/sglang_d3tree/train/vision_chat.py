"""Questions about images as the language tower meets them: the checkpoint's own chat template, cut into segments."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_d3tree.demo import scenes
from sglang_d3tree.train.vision_language import Segment

# Words that an answer is judged by. The words around them are learned soon and need little push.
_WORDS = (
    *scenes.SHAPES,
    *scenes.COLORS,
    *scenes.SIZES,
    *scenes.NUMBERS,
    *scenes.WORDS,
    *scenes.DIGITS,
    *("yes", "no", "none", "null", "digit", "word"),
    *("top", "bottom", "left", "right", "center"),
)
_CONTENT = re.compile(rf"\b({'|'.join(_WORDS)})\b", re.IGNORECASE)
CONTENT_WEIGHT, OTHER_WEIGHT, END_WEIGHT = 1.0, 0.2, 0.5
SHORT_BOOST = 3.0
"""A short answer has one word to learn from, a description twenty."""
LONG_KINDS = ("describe", "list", "json")


@dataclass
class ChatWriter:
    """Tokenizes chats about one image. `prefix` holds the ids up to and with the vision start, equal in all chats."""

    tokenizer: Any
    prefix: Tensor
    image_id: int
    end_id: int
    _start: str
    _stop: str
    _cache: dict[tuple[str, str, str], Segment]

    @classmethod
    def load(cls, checkpoint: Path) -> ChatWriter:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
        content = [{"type": "image"}, {"type": "text", "text": "QUESTION"}]
        chat = [{"role": "user", "content": content}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        before, after = text.split("<|image_pad|>")
        start, stop = after.removeprefix("<|vision_end|>").split("QUESTION")
        prefix = torch.tensor(tokenizer(before, add_special_tokens=False)["input_ids"])
        image_id, end_id = tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|vision_end|>"])
        return cls(tokenizer, prefix, image_id, end_id, start, stop, {})

    def segment(self, chat: scenes.Chat) -> Segment:
        key = (chat.kind, chat.prompt, chat.answer)
        if key not in self._cache:
            self._cache[key] = self._segment(chat)
        return self._cache[key]

    def _segment(self, chat: scenes.Chat) -> Segment:
        prompt = self.tokenizer(self._start + chat.prompt + self._stop, add_special_tokens=False)["input_ids"]
        coded = self.tokenizer(chat.answer, add_special_tokens=False, return_offsets_mapping=True)
        spans = [match.span() for match in _CONTENT.finditer(chat.answer)]
        boost = 1.0 if chat.kind in LONG_KINDS else SHORT_BOOST
        weights = [
            boost * (CONTENT_WEIGHT if any(a < end and start < b for a, b in spans) else OTHER_WEIGHT)
            for start, end in coded["offset_mapping"]
        ]
        answer = [*coded["input_ids"], self.tokenizer.eos_token_id]
        return Segment(prompt, answer, [*weights, boost * END_WEIGHT])


def fill(writer: ChatWriter, chats: list[scenes.Chat], room: int) -> list[scenes.Chat]:
    """The leading chats that fit into `room` tokens, skipping those too long; never empty."""
    chosen: list[scenes.Chat] = []
    for chat in chats:
        segment = writer.segment(chat)
        length = len(segment.prompt) + len(segment.answer)
        if length <= room or not chosen:
            chosen.append(chat)
            room -= length
    return chosen
