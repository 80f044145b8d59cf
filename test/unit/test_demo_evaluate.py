"""The numbers of `make demo-eval`, from answers to a table."""

from __future__ import annotations

import pytest

from sglang_d3tree.demo.evaluate import Rounds, accept_length, report


def test_accept_length_is_tokens_over_rounds_not_a_mean_of_ratios() -> None:
    found = accept_length("text", "d3tree", [Rounds(tokens=90, rounds=30), Rounds(tokens=10, rounds=10)])
    assert found.mean == pytest.approx(2.5)
    assert (found.answers, found.rounds) == (2, 40)
    assert 1.0 <= found.low <= found.mean <= found.high <= 3.0


def test_interval_narrows_with_the_number_of_answers() -> None:
    few = [Rounds(tokens=30 + 7 * i, rounds=20) for i in range(5)]
    one, many = (accept_length("text", "chain", few * times) for times in (1, 40))
    assert many.mean == pytest.approx(one.mean)
    assert many.high - many.low < (one.high - one.low) / 3


def test_report_shows_shares_intervals_and_the_text() -> None:
    scores = {"easy-vqa test": {"right": 91, "total": 100}}
    text = {"original": 2.0, "adapted": 2.02, "tokens": 512, "rise": 0.01}
    page = report(scores, text, [accept_length("code", "d3tree", [Rounds(50, 20)] * 3)], "a command")
    assert "| easy-vqa test | 91 | 100 | 91.0 % |" in page
    assert "2.020 on 512" in page and "+1.0%" in page
    assert "| code | d3tree | 3 | 60 | 2.50 | 2.50 to 2.50 |" in page
    assert "`a command`" in page
