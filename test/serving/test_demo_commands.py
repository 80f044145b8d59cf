"""The demo's longer-lived commands, as somebody at a terminal uses them."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests

from sglang_d3tree.demo.scenes import scenes
from sglang_d3tree.demo.tour import demo_image

SECONDS_TO_START = 400


@contextmanager
def _demo(*flags: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "sglang_d3tree.cli", "demo", *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)


def _line_with(process: subprocess.Popen[str], beginning: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(beginning):
            return line
    raise AssertionError(f"ended with {process.wait()} before it said {beginning!r}")


@pytest.mark.timeout(SECONDS_TO_START)
def test_demo_serve_prints_a_request_that_works_and_takes_its_server_along_when_ended() -> None:
    with _demo("--serve") as demo:
        command = shlex.split(_line_with(demo, "curl "))
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
        assert '"finish_reason"' in answer
        url = command[1].removesuffix("/v1/chat/completions")
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(timeout=60) == 128 + signal.SIGTERM
        with pytest.raises(requests.ConnectionError):
            requests.get(f"{url}/health", timeout=5)


@pytest.mark.timeout(SECONDS_TO_START)
def test_demo_chat_looks_at_the_image_and_shows_the_accept_length_of_every_answer(tmp_path: Path) -> None:
    picture = tmp_path / "scene.png"
    picture.write_bytes(demo_image())
    lines = [f"/image {picture}", "Describe the image.", "/image /no/such.png", "/new", "Name a colour.", "/quit"]
    with _demo("--chat") as demo:
        said, _ = demo.communicate("\n".join(lines) + "\n", timeout=SECONDS_TO_START)
    assert demo.returncode == 0
    assert f"attached {picture}" in said
    assert "cannot read '/no/such.png'" in said
    scene = next(scenes(7, held_out=True))
    answer = said.split("attached", 1)[1].split("you>")[1]
    assert any(thing.shape in answer for thing in scene.things), answer
    lengths = re.findall(r"\[accept length (\d+\.\d+) in \d+ rounds\]", said)
    assert len(lengths) == 2 and all(float(length) >= 1.0 for length in lengths)
