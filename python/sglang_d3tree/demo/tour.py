"""``make demo``: serve the demo pair, ask it things, and compare its speed with plain decoding."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from sglang_d3tree.demo.pair import DemoPair
from sglang_d3tree.demo.scenes import render, scenes
from sglang_d3tree.demo.server import Server
from sglang_d3tree.demo.workloads import ANSWER_TOKENS, chat_message, png
from sglang_d3tree.paths import cache_directory

TEXT_PROMPTS = (
    "Write a short story about a lighthouse keeper and a storm.",
    "Explain in a few sentences why the sky is blue.",
    "Give me three tips for learning to cook.",
)
IMAGE_PROMPT = "Describe the image."
KV_TOKENS = "16384"


@dataclass(frozen=True)
class Answer:
    """One streamed answer: its text, its length in tokens, and the seconds from the first piece to the last."""

    text: str
    tokens: int
    seconds: float


def demo_image() -> bytes:
    """A held-out rendered scene, as PNG."""
    return png(render(next(scenes(7, held_out=True)), seed=7).image)


def plain_arguments(pair: DemoPair) -> list[str]:
    """Server arguments for decoding without speculation."""
    return ["--model-path", str(pair.model_path), "--max-total-tokens", KV_TOKENS]


def d3tree_arguments(pair: DemoPair) -> list[str]:
    """Server arguments for D3TREE."""
    return [
        *plain_arguments(pair),
        "--speculative-algorithm",
        "d3tree",
        "--speculative-draft-model-path",
        str(pair.draft_model_path),
    ]


def stream_answer(client: Any, messages: list[dict[str, Any]], show: bool = True) -> Answer:
    """Stream one greedy chat answer through the OpenAI client."""
    stream = client.chat.completions.create(
        model="default",
        messages=messages,
        max_tokens=ANSWER_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces: list[str] = []
    tokens, first = 0, 0.0
    for chunk in stream:
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter()
            pieces.append(chunk.choices[0].delta.content)
            if show:
                print(pieces[-1], end="", flush=True)
    if show:
        print()
    return Answer("".join(pieces), tokens, time.perf_counter() - first)


def server_info(url: str) -> dict[str, Any]:
    """What the server says about itself."""
    return dict(requests.get(f"{url}/server_info", timeout=30).json())


def frontend_program(url: str, image_file: Path) -> str:
    """An SGLang frontend program with an image, as a user of the frontend language would write it."""
    import sglang as sgl
    from sglang.lang.chat_template import get_chat_template

    @sgl.function
    def look(s: Any, picture: str) -> None:
        s += sgl.user(sgl.image(picture) + "Which shapes are in the image?")
        s += sgl.assistant(sgl.gen("answer", max_tokens=48, temperature=0))

    endpoint = sgl.RuntimeEndpoint(url)
    # The frontend guesses placeholders from the model's path, which says nothing here; a wrong one loses the image.
    endpoint.chat_template = get_chat_template("qwen2-vl")
    sgl.set_default_backend(endpoint)
    return str(look.run(picture=str(image_file))["answer"])


def ask_everything(server: Server, image: bytes, show: bool) -> list[Answer]:
    """The tour's questions, one after the other."""
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    questions = [([chat_message(IMAGE_PROMPT, image)], f"[image] {IMAGE_PROMPT}")]
    questions += [([chat_message(prompt)], prompt) for prompt in TEXT_PROMPTS]
    answers = []
    for messages, title in questions:
        if show:
            print(f"\n> {title}")
        answers.append(stream_answer(client, messages, show))
    return answers


def decode_speed(answers: list[Answer]) -> float:
    """Tokens per second while answering, prefill excluded."""
    return sum(max(answer.tokens - 1, 0) for answer in answers) / sum(answer.seconds for answer in answers)


def tour(pair: DemoPair) -> None:
    """Run the demo.

    Raises:
        ServerFailed: when a server does not come up.
        RuntimeError: when D3TREE's float32 answers differ from plain decoding's.
    """
    image = demo_image()
    image_file = cache_directory() / "demo.png"
    image_file.parent.mkdir(parents=True, exist_ok=True)
    image_file.write_bytes(image)

    with Server(plain_arguments(pair), name="plain server") as server:
        plain = ask_everything(server, image, show=False)
    with Server(d3tree_arguments(pair), name="d3tree server") as server:
        print(f"d3tree server is up at {server.url}; the image is {image_file}")
        answers = ask_everything(server, image, show=True)
        info = server_info(server.url)
        print("\n> [frontend program: sgl.function with sgl.image] Which shapes are in the image?")
        print(frontend_program(server.url, image_file))

    same = sum(a.text == b.text for a, b in zip(plain, answers, strict=True))
    speed, plain_speed = decode_speed(answers), decode_speed(plain)
    print(f"\nanswers equal to plain decoding's: {same} of {len(plain)}")
    print(f"accept length: {info['internal_states'][0]['d3tree']['accept_length']:.2f} tokens per round")
    print(f"decoding: {speed:.1f} tokens/s with d3tree, {plain_speed:.1f} plain ({speed / plain_speed:.2f}x)")
    if same < len(plain) and info["dtype"] == "float32":
        raise RuntimeError("D3TREE's greedy answers differ from plain decoding's; see docs/method.md, Lossless.")
