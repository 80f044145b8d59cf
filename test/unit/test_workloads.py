"""Requests of the four kinds are held out, reproducible, and what a server takes."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

from sglang_d3tree.demo import workloads
from sglang_d3tree.train.prompts import is_held_out


@pytest.mark.parametrize("kind", workloads.KINDS)
def test_longer_lists_extend_shorter_ones(kind: str) -> None:
    long, short = workloads.requests_of(kind, 12), workloads.requests_of(kind, 5)
    assert long[:5] == short
    assert len({str(request.messages) for request in long}) == 12
    assert {request.kind for request in long} == {kind}


def test_text_and_code_prompts_were_never_trained_on() -> None:
    for kind in ("text", "code"):
        for request in workloads.requests_of(kind, 20):
            (message,) = request.messages
            assert is_held_out(message["content"]) or message["content"].startswith("Complete this Python function")


def test_pictures_travel_inside_the_request() -> None:
    for request in workloads.requests_of("image-short", 4) + workloads.requests_of("image-long", 2):
        picture, _ = request.messages[0]["content"]
        content = base64.b64decode(picture["image_url"]["url"].removeprefix("data:image/png;base64,"))
        assert Image.open(io.BytesIO(content)).size in ((64, 64), (112, 112))
        assert request.body(max_tokens=3)["max_tokens"] == 3 and request.body()["temperature"] == 0


def test_more_requests_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="held-out requests"):
        workloads.requests_of("code", 5000)
