"""What the load benchmark asks: held-out texts, code questions, and rendered scenes with short and long answers."""

from __future__ import annotations

import base64
import io
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_d3tree.demo import scenes
from sglang_d3tree.train.prompts import build_prompts

KINDS = ("text", "code", "image-short", "image-long")
_SEED = 90_000


@dataclass(frozen=True)
class Request:
    """One user message; image is a PNG as data URI, or None."""

    text: str
    image: str | None = None

    def body(self, max_tokens: int) -> dict[str, object]:
        """The body of a streamed greedy chat request."""
        content: list[dict[str, object]] = [{"type": "text", "text": self.text}]
        if self.image is not None:
            content.insert(0, {"type": "image_url", "image_url": {"url": self.image}})
        return {
            "model": "default",
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def requests_of(kind: str, count: int, first: int = 0) -> list[Request]:
    """`count` different requests of one kind, from the `first` on; the same ones every time."""
    return list(itertools.islice(_requests(kind), first, first + count))


def _requests(kind: str) -> Iterator[Request]:
    if kind in ("text", "code"):
        for prompt in build_prompts(20_000, _SEED):
            if prompt.held_out and (prompt.kind == "code") == (kind == "code"):
                yield Request(prompt.text)
        return
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; known: {', '.join(KINDS)}")
    for index, scene in enumerate(scenes.scenes(_SEED, held_out=True)):
        rng = random.Random(index)
        chats = scenes.long_chats(scene, rng) if kind == "image-long" else scenes.questions(scene, rng)
        yield Request(rng.choice(chats).prompt, _picture(scene))


def _picture(scene: scenes.Scene) -> str:
    buffer = io.BytesIO()
    scenes.render(scene, _SEED).image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
