"""The accept-length benchmark's own arithmetic, and that it asks what it says it asks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

from accept_report import AcceptLength, accept_length, plot, table

from sglang_d3tree.demo.workloads import Request, chat_message, png
from sglang_d3tree.train.replay import Replayed
from sglang_d3tree.train.workload_answers import _parts


def test_intervals_are_over_answers_and_long_answers_weigh_more() -> None:
    replays = [Replayed(tokens=90, rounds=30, rows=480)] * 5 + [Replayed(tokens=4, rounds=4, rows=20)] * 5
    found = accept_length("text", "ddtree", 16, 16.0, replays)
    assert found.mean == pytest.approx(470 / 170)
    assert found.verified == pytest.approx(2500 / 170)
    assert found.low < found.mean < found.high
    alike = accept_length("text", "ddtree", 16, 16.0, replays[:5])
    assert alike.low == alike.mean == alike.high == 3.0


def test_table_shows_methods_with_fewer_rows_than_they_may_use(tmp_path: Path) -> None:
    def result(method: str, rows: int, verified: float) -> AcceptLength:
        return AcceptLength("code", method, rows, verified, 1.0, 3, 9, 2.5, 2.0, 3.0)

    results = [result("chain", 8, 8.0), result("chain", 16, 8.0), result("ddtree", 16, 16.0)]
    plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5_000
    text = table(results)
    assert "| mean rows per round | 8 | 16 |" in text
    assert "| chain | 2.50 [2.00, 3.00] | 2.50 [2.00, 3.00], 8.0 rows |" in text
    assert "| ddtree |  | 2.50 [2.00, 3.00] |" in text


def test_a_requests_picture_arrives_as_it_was_sent() -> None:
    from PIL import Image

    picture = Image.new("RGB", (12, 8), (200, 10, 30))
    text, found = _parts(Request("image-short", (chat_message("What is it?", png(picture)),)))
    assert text == "What is it?"
    assert found is not None and found.size == (12, 8) and found.getpixel((3, 3)) == (200, 10, 30)
    assert _parts(Request("text", (chat_message("Hello"),))) == ("Hello", None)
