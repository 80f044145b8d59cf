"""In float32 at temperature 0, D3TREE emits exactly the tokens of stock SGLang, whatever happens around a request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support import models
from support.calls import at_once, complete, hang_up_after, output_ids, stream
from support.exact import greedy_ids, tokenizer_of
from support.prompts import IMAGE, Prompt, data_uri, drawn, image_prompts, text_prompts, user
from support.servers import Server, without_times

from sglang_d3tree.demo import workloads

pytestmark = pytest.mark.timeout(900)

PROMPTS = text_prompts() + image_prompts()
LENGTH = 40
END_IDS = (0, 2)
POLICIES = ("chain", "ddtree", "caddtree", "d3tree")


@pytest.fixture(scope="module")
def expected(stock: Server) -> dict[str, list[int]]:
    """Stock's first tokens after every prompt, end tokens ignored."""
    answers = complete(stock, PROMPTS, concurrency=8, max_new_tokens=LENGTH, ignore_eos=True)
    return {prompt.name: ids for prompt, ids in zip(PROMPTS, output_ids(answers), strict=True)}


def until_end(ids: list[int]) -> list[int]:
    """The part of an endless answer that a request gets which stops at the end token."""
    ends = [i for i, token in enumerate(ids) if token in END_IDS]
    return ids[: ends[0] + 1] if ends else ids


def assert_equal(prompts: list[Prompt], found: list[list[int]], expected: dict[str, list[int]]) -> None:
    wrong = {
        prompt.name: (ids, expected[prompt.name][: len(ids)])
        for prompt, ids in zip(prompts, found, strict=True)
        if ids != expected[prompt.name][: len(ids)]
    }
    assert not wrong, f"{len(wrong)} of {len(prompts)} differ, (found, stock): {wrong}"


def test_the_prompts_are_what_the_claim_says() -> None:
    assert len({(p.text, p.images) for p in PROMPTS}) == len(PROMPTS) >= 40
    assert sum(bool(p.images) for p in PROMPTS) >= 20
    assert any(len(p.images) == 2 for p in PROMPTS)


def test_alone_with_cold_cache(d3tree: Server, expected: dict[str, list[int]]) -> None:
    d3tree.flush_cache()
    answers = complete(d3tree, PROMPTS, max_new_tokens=32, ignore_eos=True)
    assert all(len(ids) == 32 for ids in output_ids(answers))
    assert_equal(PROMPTS, output_ids(answers), expected)


def test_eight_at_once_with_cold_cache(d3tree: Server, expected: dict[str, list[int]]) -> None:
    d3tree.flush_cache()
    answers = complete(d3tree, PROMPTS, concurrency=8, max_new_tokens=LENGTH, ignore_eos=True)
    assert all(len(ids) == LENGTH for ids in output_ids(answers))
    assert_equal(PROMPTS, output_ids(answers), expected)


def test_long_prompts_were_prefilled_in_chunks(d3tree: Server, expected: dict[str, list[int]]) -> None:
    d3tree.flush_cache()
    before = len(d3tree.log())
    long = [prompt for prompt in PROMPTS if prompt.name.startswith("long")]
    answers = complete(d3tree, long, max_new_tokens=4, ignore_eos=True)
    assert_equal(long, output_ids(answers), expected)
    chunks = [line for line in d3tree.log()[before:].splitlines() if "#new-token: 64," in line]
    assert len(chunks) >= len(long), without_times(d3tree.log()[before:])


def test_ending_where_the_model_ends(stock: Server, d3tree: Server, expected: dict[str, list[int]]) -> None:
    answers = complete(d3tree, PROMPTS, concurrency=8, max_new_tokens=LENGTH)
    wrong = {
        prompt.name: (answer["output_ids"], until_end(expected[prompt.name]))
        for prompt, answer in zip(PROMPTS, answers, strict=True)
        if answer["output_ids"] != until_end(expected[prompt.name])
    }
    assert not wrong
    ended = [
        prompt
        for prompt, answer in zip(PROMPTS, answers, strict=True)
        if answer["meta_info"]["finish_reason"]["type"] == "stop"
    ]
    assert ended, "no prompt ended by itself, so ending was not tested"
    sample = ended[:4] + [prompt for prompt in PROMPTS if prompt not in ended][:2]
    by_name = {prompt.name: answer for prompt, answer in zip(PROMPTS, answers, strict=True)}
    for prompt, theirs in zip(sample, complete(stock, sample, concurrency=6, max_new_tokens=LENGTH), strict=True):
        ours = by_name[prompt.name]
        assert (ours["text"], ours["output_ids"]) == (theirs["text"], theirs["output_ids"])
        assert ours["meta_info"]["finish_reason"] == theirs["meta_info"]["finish_reason"]


@pytest.mark.parametrize("kind", list(workloads.KINDS))
def test_what_the_demo_asks_is_answered_as_by_stock(kind: str, stock: Server, d3tree: Server) -> None:
    """Held-out requests as clients send them, to their own end: a word for a picture, a hundred tokens for a text."""
    asked = [request.body() for request in workloads.requests_of(kind, 4)]

    def answers(server: Server) -> list[tuple[str, str]]:
        replies = at_once(lambda body: server.post("/v1/chat/completions", body).json(), asked, concurrency=4)
        return [(c["message"]["content"], c["finish_reason"]) for c in (reply["choices"][0] for reply in replies)]

    found = answers(d3tree)
    assert found == answers(stock)
    assert all(text for text, _ in found)


def test_repeated_image_comes_from_the_radix_cache(d3tree: Server, expected: dict[str, list[int]]) -> None:
    d3tree.flush_cache()
    prompts = [prompt for prompt in PROMPTS if prompt.images and IMAGE + "<" not in prompt.text][:4]
    cold = complete(d3tree, prompts, max_new_tokens=24, ignore_eos=True)
    warm = complete(d3tree, prompts, max_new_tokens=24, ignore_eos=True)
    assert_equal(prompts, output_ids(cold), expected)
    assert_equal(prompts, output_ids(warm), expected)
    for prompt, answer in zip(prompts, warm, strict=True):
        # All but the last token at most; the image's own 16 tokens must be among them.
        assert answer["meta_info"]["cached_tokens"] >= answer["meta_info"]["prompt_tokens"] - 16, prompt.name
        assert answer["meta_info"]["cached_tokens"] > 16, prompt.name


def test_other_image_does_not_hit_the_cache_of_the_first(stock: Server, d3tree: Server) -> None:
    """Same text, same number of image tokens, other pixels."""
    d3tree.flush_cache()
    pictures = [data_uri(drawn(300 + i, 120, 120)) for i in range(2)]
    prompts = [Prompt(f"twin {i}", user(f"{IMAGE}Describe the image."), (p,)) for i, p in enumerate(pictures)]
    ours = complete(d3tree, prompts, max_new_tokens=24, ignore_eos=True)
    theirs = complete(stock, prompts, max_new_tokens=24, ignore_eos=True)
    assert output_ids(ours) == output_ids(theirs)
    start_of_image = len("<|im_start|>user\n")
    assert ours[1]["meta_info"]["cached_tokens"] <= start_of_image


def test_repeated_prefix_and_a_continued_answer(stock: Server, d3tree: Server) -> None:
    """The KV that verify rounds left behind, accepted nodes moved into place, serves the next turn."""
    d3tree.flush_cache()
    first = user("Tell me about whales.")
    answer = d3tree.generate(first, max_new_tokens=48, ignore_eos=True)
    follow_up = first + answer["text"] + "<|im_end|>\n" + user("And how long do they live?")
    ours = d3tree.generate(follow_up, max_new_tokens=32, ignore_eos=True)
    assert ours["meta_info"]["cached_tokens"] > answer["meta_info"]["prompt_tokens"] + 24
    assert ours["output_ids"] == stock.generate(follow_up, max_new_tokens=32, ignore_eos=True)["output_ids"]


def test_neighbours_of_an_aborted_stream(d3tree: Server, expected: dict[str, list[int]]) -> None:
    """Two clients hang up in the middle while six others go on; then the abandoned prompts are asked again."""
    gone, staying = PROMPTS[:2], PROMPTS[2:5] + PROMPTS[22:25]

    def ask(prompt: Prompt) -> list[int] | None:
        if prompt in gone:
            hang_up_after(d3tree, prompt.text, 3, max_new_tokens=400, ignore_eos=True, **prompt.body())
            return None
        ids: list[int] = d3tree.generate(prompt.text, max_new_tokens=LENGTH, ignore_eos=True, **prompt.body())[
            "output_ids"
        ]
        return ids

    answers = at_once(ask, gone + staying, concurrency=8)
    assert_equal(staying, [ids for ids in answers if ids is not None], expected)
    again = complete(d3tree, gone, max_new_tokens=LENGTH, ignore_eos=True)
    assert_equal(gone, output_ids(again), expected)


@pytest.fixture
def restored_options(d3tree: Server) -> Iterator[None]:
    yield
    d3tree.set_options(policy="d3tree", threshold=0.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_switched_at_run_time(
    policy: str, d3tree: Server, expected: dict[str, list[int]], restored_options: None
) -> None:
    d3tree.set_options(policy=policy, threshold=0.05)
    assert d3tree.internal_state()["d3tree"]["policy"] == policy
    prompts = PROMPTS[:4] + PROMPTS[18:21] + PROMPTS[22:28] + PROMPTS[38:41]
    answers = complete(d3tree, prompts, concurrency=8, max_new_tokens=32, ignore_eos=True)
    assert_equal(prompts, output_ids(answers), expected)


def test_policy_changed_in_the_middle_of_a_stream(
    d3tree: Server, expected: dict[str, list[int]], restored_options: None
) -> None:
    prompt = PROMPTS[2]
    last: dict[str, Any] = {}
    for count, chunk in enumerate(stream(d3tree, prompt.text, max_new_tokens=LENGTH, ignore_eos=True)):
        if count % 4 == 0:
            d3tree.set_options(policy=POLICIES[count // 4 % len(POLICIES)], threshold=0.05)
        last = chunk
    assert len(last["output_ids"]) == LENGTH
    assert_equal([prompt], [last["output_ids"]], expected)


# ---------------------------------------------------------------- long accepted paths through wide trees

LETTER_PROMPTS = ("et", "tao", "aaaa", "o", "the cat sat on", "a red ball, e", "teateatea", "ooooooo", "ea", "toe")


@pytest.fixture(scope="module")
def letters_expected() -> dict[str, list[int]]:
    """Greedy text of the letters target by transformers, a reference without any SGLang."""
    target = models.letters_target()
    return {p: greedy_ids(target, tokenizer_of(target)(p).input_ids, 64) for p in LETTER_PROMPTS}


def test_non_speculative_serving_on_the_platform(letters_plain: Server, letters_expected: dict[str, list[int]]) -> None:
    answers = letters_plain.generate(list(LETTER_PROMPTS), max_new_tokens=64, ignore_eos=True)
    assert dict(zip(LETTER_PROMPTS, output_ids(answers), strict=True)) == letters_expected


@pytest.mark.parametrize("policy", POLICIES)
def test_deep_accepted_paths_with_45_rows(policy: str, letters: Server, letters_expected: dict[str, list[int]]) -> None:
    """Any drafter proposes the four letters, so paths deep in a tree of scattered rows are accepted every round."""
    letters.flush_cache()
    try:
        letters.set_options(policy=policy, threshold=0.002)
        alone = [letters.generate(p, max_new_tokens=64, ignore_eos=True) for p in LETTER_PROMPTS]
        batch = letters.generate(list(LETTER_PROMPTS), max_new_tokens=64, ignore_eos=True)
    finally:
        letters.set_options(policy="d3tree", threshold=0.0)
    for answers in (alone, batch):
        assert dict(zip(LETTER_PROMPTS, output_ids(answers), strict=True)) == letters_expected
    if policy in ("ddtree", "d3tree"):
        verified = sum(answer["meta_info"]["spec_verify_ct"] for answer in alone)
        assert 64 * len(alone) / verified > 2.0
        depths = [len(answer["meta_info"]["spec_correct_drafts_histogram"]) - 1 for answer in alone]
        assert max(depths) >= 3, depths


def test_answer_that_runs_into_the_end_of_the_context(letters: Server, letters_plain: Server) -> None:
    """The last rounds draft past the last position; what they emit before it is still right."""
    prompt = "teao" * 2037
    room = 8192 - len(prompt)
    ours = letters.generate(prompt, max_new_tokens=room, ignore_eos=True)
    theirs = letters_plain.generate(prompt, max_new_tokens=room, ignore_eos=True)
    assert ours["output_ids"] == theirs["output_ids"]
    assert len(ours["output_ids"]) >= room - 2
    assert ours["meta_info"]["finish_reason"]["type"] == theirs["meta_info"]["finish_reason"]["type"] == "length"
    short = letters.generate("et", max_new_tokens=32, ignore_eos=True)["output_ids"]
    assert short == letters_plain.generate("et", max_new_tokens=32, ignore_eos=True)["output_ids"]
