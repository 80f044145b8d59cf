"""Longer-lived demos: a server that stays up, and a chat in the terminal."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import requests

from sglang_d3tree.demo.pair import DemoPair
from sglang_d3tree.demo.server import Server
from sglang_d3tree.demo.tour import d3tree_arguments, demo_image
from sglang_d3tree.demo.workloads import chat_message
from sglang_d3tree.paths import cache_directory


def serve(pair: DemoPair) -> None:
    """Keep a D3TREE server up until interrupted; prints a request to try."""
    with Server(d3tree_arguments(pair), name="d3tree server") as server:
        body: dict[str, Any] = {"model": "default", "messages": [chat_message("Tell me about the sea.")]}
        body |= {"max_tokens": 64, "temperature": 0}
        print(f"Serving at {server.url}; stop with Ctrl-C. Try:\n")
        print(f"curl {server.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'\n")
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            print("\nstopping")


def chat(pair: DemoPair) -> None:
    """A conversation in the terminal; ``/image PATH`` attaches an image to the next message."""
    image_file = cache_directory() / "demo.png"
    image_file.parent.mkdir(parents=True, exist_ok=True)
    image_file.write_bytes(demo_image())
    with Server(d3tree_arguments(pair), name="d3tree server") as server:
        print(f"/image PATH attaches an image (try /image {image_file}), /new starts over, /quit leaves.")
        messages: list[dict[str, Any]] = []
        image: bytes | None = None
        while True:
            try:
                line = input("you> ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if line == "/quit":
                return
            if line == "/new":
                messages, image = [], None
            elif line.startswith("/image"):
                image = _read_image(line.removeprefix("/image").strip())
            elif line:
                messages.append(chat_message(line, image))
                image = None
                messages.append({"role": "assistant", "content": _answer(server.url, messages)})


def _read_image(path: str) -> bytes | None:
    try:
        content = Path(path).expanduser().read_bytes()
    except OSError as error:
        print(f"cannot read {path!r}: {error.strerror}")
        return None
    print(f"attached {path}, {len(content)} bytes")
    return content


def _answer(url: str, messages: list[dict[str, Any]]) -> str:
    """Stream one answer and print its accept length; ends early on an error from the server."""
    body: dict[str, Any] = {
        "model": "default",
        "messages": messages,
        "max_tokens": 256,
        # A model this small loses its thread when it draws its words.
        "temperature": 0,
        "stream": True,
        "return_spec_tokens_details": True,
    }
    text, details = "", None
    with requests.post(f"{url}/v1/chat/completions", json=body, stream=True, timeout=600) as response:
        if response.status_code != 200:
            print(f"server says: {response.text}")
            return ""
        for line in response.iter_lines():
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            event = json.loads(line[len(b"data: ") :])
            details = (event.get("sglext") or {}).get("spec_tokens_details") or details
            for choice in event.get("choices", []):
                piece = choice["delta"].get("content") or ""
                text += piece
                print(piece, end="", flush=True)
    if details:
        print(f"\n  [accept length {details['spec_accept_length']:.2f} in {details['spec_verify_ct']} rounds]", end="")
    print()
    return text
