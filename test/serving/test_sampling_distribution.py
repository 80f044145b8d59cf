"""Sampled text follows the target's own distribution, and seeds make it repeatable.

The exact probabilities of the first three tokens come from transformers on the same checkpoint; the draws come from
the D3TREE server, drafts accepted along the way. Seeded draws use the seeds 0, 1, 2, ..., so they never change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from support import models
from support.calls import output_ids
from support.exact import min_p, no_filter, tokenizer_of, top_k, top_p, triple_distribution
from support.servers import Server

pytestmark = pytest.mark.timeout(900)

PROMPT = "tao"
DRAWS = 3000
SIGNIFICANT = 1e-3
# Cells expected more rarely than this share one cell, as the test's approximation asks for.
FEWEST = 5.0

Filter = Callable[[torch.Tensor], torch.Tensor]
CASES: dict[str, tuple[dict[str, Any], Filter]] = {
    "temperature 1": ({}, no_filter),
    "top_p 0.9": ({"top_p": 0.9}, top_p(0.9)),
    "top_k 3": ({"top_k": 3}, top_k(3)),
    "min_p 0.2": ({"min_p": 0.2}, min_p(0.2)),
}


def exact(filter_probs: Filter) -> torch.Tensor:
    target = models.letters_target()
    return triple_distribution(target, tokenizer_of(target)(PROMPT).input_ids, filter_probs)


def draw(server: Server, seeded: bool, count: int = DRAWS, **options: Any) -> list[tuple[int, int, int]]:
    """``count`` samples of the first three tokens, and proof that drafts were accepted in them."""
    common = {"temperature": 1.0, "max_new_tokens": 3, "ignore_eos": True, **options}
    parameters = [{**common, **({"sampling_seed": seed} if seeded else {})} for seed in range(count)]
    response = server.post("/generate", {"text": [PROMPT] * count, "sampling_params": parameters}, timeout=600)
    assert response.status_code == 200, response.text[:2000]
    answers = response.json()
    accepted = sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers)
    assert accepted > count / 2, "hardly a draft was accepted, so the walk through the tree was not tested"
    return [tuple(ids) for ids in output_ids(answers)]


def p_value(draws: Sequence[tuple[int, int, int]], probabilities: torch.Tensor) -> float:
    """Chi-square test of the draws against the exact distribution; 0 if something impossible was drawn."""
    counts = Counter(draws)
    expected = probabilities * len(draws)
    if any(probabilities[cell] < 1e-12 for cell in counts):
        return 0.0
    common = expected >= FEWEST
    observed_common = [counts[tuple(cell)] for cell in common.nonzero().tolist()]
    observed = [*observed_common, len(draws) - sum(observed_common)]
    wanted = [*expected[common].tolist(), float(expected[~common].sum())]
    if wanted[-1] < FEWEST:
        # Too rare to be a cell of its own.
        observed, wanted = [*observed[:-2], sum(observed[-2:])], [*wanted[:-2], sum(wanted[-2:])]
    scale = sum(observed) / sum(wanted)
    return float(chisquare(observed, [w * scale for w in wanted]).pvalue)


@pytest.mark.parametrize("case", [name for name in CASES if not name.startswith("min_p")])
def test_seeded_draws_follow_the_target(case: str, letters_seeded: Server) -> None:
    options, filter_probs = CASES[case]
    draws = draw(letters_seeded, seeded=True, **options)
    assert p_value(draws, exact(filter_probs)) > SIGNIFICANT
    # The same draws must not pass for another distribution, or the test shows nothing.
    others = [other for name, (_, other) in CASES.items() if name != case]
    assert all(p_value(draws, exact(other)) < 1e-6 for other in others)


@pytest.mark.parametrize("case", CASES)
def test_unseeded_draws_follow_the_target(case: str, letters: Server) -> None:
    """Other batches give other draws, so a bad first sample may be bad luck; bad luck does not come twice."""
    options, filter_probs = CASES[case]
    probabilities = exact(filter_probs)
    attempts = (p_value(draw(letters, seeded=False, **options), probabilities) for _ in range(2))
    assert any(p > SIGNIFICANT for p in attempts)


def test_the_test_rejects_a_slightly_hotter_target() -> None:
    """Draws from the exact distribution pass, draws from one 10 % hotter do not."""
    target = models.letters_target()
    prompt = tokenizer_of(target)(PROMPT).input_ids
    right = exact(no_filter)

    def hotter(probs: torch.Tensor) -> torch.Tensor:
        return (probs.log() / 1.1).softmax(-1)

    generator = torch.Generator().manual_seed(0)

    def sample(probabilities: torch.Tensor) -> list[tuple[int, int, int]]:
        flat = torch.multinomial(probabilities.flatten(), DRAWS, replacement=True, generator=generator)
        size = probabilities.shape[0]
        return [(i // size**2, i // size % size, i % size) for i in flat.tolist()]

    assert p_value(sample(right), right) > SIGNIFICANT
    assert p_value(sample(triple_distribution(target, prompt, hotter)), right) < SIGNIFICANT


def test_greedy_requests_are_not_disturbed_by_sampled_neighbours(letters: Server) -> None:
    alone = letters.generate(PROMPT, max_new_tokens=48, ignore_eos=True)["output_ids"]
    parameters = [
        {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True},
        {"temperature": 1, "max_new_tokens": 48, "ignore_eos": True},
        {"temperature": 0.7, "top_k": 2, "max_new_tokens": 48, "ignore_eos": True},
        {"temperature": 1.5, "top_p": 0.5, "min_p": 0.1, "max_new_tokens": 48, "ignore_eos": True},
    ] * 2
    body = {"text": [PROMPT] * len(parameters), "sampling_params": parameters}
    answers = letters.post("/generate", body).json()
    assert answers[0]["output_ids"] == alone == answers[4]["output_ids"]
    assert any(answer["output_ids"] != alone for answer in answers)


# ---------------------------------------------------------------- seeds


def seeded(server: Server, seeds: Sequence[int], **options: Any) -> list[list[int]]:
    """One request per seed, all in one batch."""
    parameters = [
        {"temperature": 1, "max_new_tokens": 40, "ignore_eos": True, "sampling_seed": seed, **options} for seed in seeds
    ]
    return output_ids(server.post("/generate", {"text": [PROMPT] * len(seeds), "sampling_params": parameters}).json())


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 3}], ids=["temperature 1", "top_p", "top_k"])
def test_a_seed_gives_the_same_text_alone_in_a_batch_and_without_speculation(
    options: dict[str, Any], letters_seeded: Server, letters_plain: Server
) -> None:
    seeds = [1, 2, 3, 4, 5, 6, 7, 2**40 + 1]
    batch = seeded(letters_seeded, seeds, **options)
    assert batch == [seeded(letters_seeded, [seed], **options)[0] for seed in seeds]
    assert batch == seeded(letters_plain, seeds, **options)
    assert len({tuple(ids) for ids in batch}) == len(seeds)


def test_openai_seed_is_the_sampling_seed(letters_seeded: Server) -> None:
    body = {"model": "default", "prompt": PROMPT, "max_tokens": 24, "temperature": 1, "ignore_eos": True}
    texts = [
        letters_seeded.post("/v1/completions", {**body, "seed": seed}).json()["choices"][0]["text"]
        for seed in (5, 6, 5)
    ]
    assert texts[0] == texts[2] != texts[1]


def test_min_p_with_seeds_is_refused_because_sglang_cannot_do_it(letters_seeded: Server) -> None:
    response = letters_seeded.post(
        "/generate", {"text": PROMPT, "sampling_params": {"min_p": 0.1, "temperature": 1, "max_new_tokens": 4}}
    )
    assert response.status_code == 400
    assert "min_p" in response.text and "--enable-deterministic-inference" in response.text
    assert seeded(letters_seeded, [1]) == seeded(letters_seeded, [1])
