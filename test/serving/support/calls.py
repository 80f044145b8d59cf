"""Many requests at once, streams, and clients that hang up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import requests

from support.prompts import Prompt
from support.servers import Server, generate_body

Item = TypeVar("Item")
Result = TypeVar("Result")


def at_once(call: Callable[[Item], Result], items: Sequence[Item], concurrency: int = 8) -> list[Result]:
    """Results in the order of the items, at most ``concurrency`` requests in flight."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(call, items))


def complete(server: Server, prompts: Sequence[Prompt], concurrency: int = 1, **options: Any) -> list[dict[str, Any]]:
    """Answers to prompts, ``concurrency`` at a time."""
    return at_once(lambda p: server.generate(p.text, **p.body(), **options), prompts, concurrency)


def output_ids(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def stream(server: Server, prompt: str, **options: Any) -> Iterator[dict[str, Any]]:
    """Chunks of a ``/generate`` stream; leaving the loop early closes the connection."""
    body = generate_body(prompt, stream=True, **options)
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=300) as response:
        assert response.status_code == 200, response.text
        for line in response.iter_lines():
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line.removeprefix(b"data: "))


def hang_up_after(server: Server, prompt: str, chunks: int, **options: Any) -> None:
    """A client that reads a few chunks of a stream and disconnects."""
    for count, _ in enumerate(stream(server, prompt, **options), start=1):
        if count == chunks:
            return
