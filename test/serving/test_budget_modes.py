"""The batch's budget on a running server: every mode is reached by the load alone, and none changes a token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support import models
from support.calls import complete, output_ids
from support.exact import greedy_ids, tokenizer_of
from support.prompts import Prompt
from support.servers import Server

from sglang_d3tree.runtime.metrics import averages

pytestmark = pytest.mark.timeout(900)

PROMPTS = [Prompt(text, text) for text in ("et", "tao", "aaaa", "o", "the cat sat on", "teateatea", "ooooooo", "ea")]
LENGTH = 64


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Greedy text of the letters target by transformers."""
    target = models.letters_target()
    return {p.text: greedy_ids(target, tokenizer_of(target)(p.text).input_ids, LENGTH) for p in PROMPTS}


def rounds_of(server: Server, prompts: list[Prompt], length: int = LENGTH) -> tuple[list[list[int]], dict[str, Any]]:
    """The answers to prompts asked at once, and what the rounds between were like."""
    before = server.internal_state()["d3tree"]["totals"]
    answers = complete(server, prompts, concurrency=len(prompts), max_new_tokens=length, ignore_eos=True)
    after = server.internal_state()["d3tree"]["totals"]
    return output_ids(answers), averages({name: after[name] - before[name] for name in after})


def test_alone_the_whole_tree_is_verified(letters_loaded: Server, expected: dict[str, list[int]]) -> None:
    for prompt in PROMPTS[:3]:
        ids, stretch = rounds_of(letters_loaded, [prompt])
        assert ids == [expected[prompt.text]]
        assert stretch["modes"]["light"] == stretch["rounds"]
        assert stretch["accept_length"] > 2 and stretch["rows_per_request"] > 20


def test_some_share_a_budget(letters_loaded: Server, expected: dict[str, list[int]]) -> None:
    ids, stretch = rounds_of(letters_loaded, PROMPTS[:3])
    assert ids == [expected[p.text] for p in PROMPTS[:3]]
    # The first and the last rounds have fewer requests.
    assert stretch["modes"]["heavy"] > 0.6 * stretch["rounds"]
    assert 1 < stretch["rows_per_request"] < 40


def test_many_decode_plainly_and_drafting_returns(letters_loaded: Server, expected: dict[str, list[int]]) -> None:
    ids, stretch = rounds_of(letters_loaded, PROMPTS)
    assert ids == [expected[p.text] for p in PROMPTS]
    assert stretch["modes"]["plain"] > 0.6 * stretch["rounds"]
    # What was decoded plainly is drafted from at once: the draft's keys and values have no gap.
    again, after = rounds_of(letters_loaded, PROMPTS[:1])
    assert again == [expected[PROMPTS[0].text]]
    assert after["modes"]["plain"] == 0 and after["accept_length"] > 2


def test_requests_come_and_go_through_all_modes(letters_loaded: Server, expected: dict[str, list[int]]) -> None:
    """Batches of two, eight and one within one stretch: a request starts drafted, goes on plainly and ends drafted."""
    order = [PROMPTS[i % len(PROMPTS)] for i in range(24)]
    before = letters_loaded.internal_state()["d3tree"]["totals"]
    answers = []
    for size in (2, 8, 1, 6, 3, 4):
        batch, order = order[:size], order[size:]
        found = complete(letters_loaded, batch, concurrency=size, max_new_tokens=LENGTH, ignore_eos=True)
        answers += list(zip(batch, output_ids(found), strict=True))
    assert all(ids == expected[prompt.text] for prompt, ids in answers)
    after = letters_loaded.internal_state()["d3tree"]["totals"]
    assert all(after[f"mode_{mode}"] > before[f"mode_{mode}"] for mode in ("plain", "light", "heavy"))


@pytest.fixture
def restored(letters_loaded: Server) -> Iterator[None]:
    yield
    letters_loaded.set_options(policy="d3tree", tree_rows=0, adaptive_horizon=True)


@pytest.mark.parametrize("policy", ["chain", "ddtree", "caddtree"])
def test_baselines_verify_the_rows_they_keep_and_no_more(
    policy: str, letters_loaded: Server, expected: dict[str, list[int]], restored: None
) -> None:
    letters_loaded.set_options(policy=policy, tree_rows=12)
    ids, stretch = rounds_of(letters_loaded, PROMPTS)
    assert ids == [expected[p.text] for p in PROMPTS]
    assert stretch["row_fill"] == 1.0
    assert stretch["rows_per_request"] == {"chain": 8, "ddtree": 12}.get(policy, stretch["rows_per_request"])
    assert stretch["rows_per_request"] <= 12 and stretch["modes"]["plain"] == 0


def test_the_horizon_may_be_fixed(letters_loaded: Server, expected: dict[str, list[int]], restored: None) -> None:
    letters_loaded.set_options(adaptive_horizon=False)
    ids, stretch = rounds_of(letters_loaded, PROMPTS[:3])
    assert ids == [expected[p.text] for p in PROMPTS[:3]]
    assert stretch["horizon"] == 7


def test_costs_of_another_model_are_refused(letters: Server, letters_loaded: Server) -> None:
    key = letters.internal_state()["d3tree"]["cost_key"]
    assert key == letters_loaded.internal_state()["d3tree"]["cost_key"]
    assert "of 64 tokens" in key["drafter"] and key["dtype"] == "float32"
