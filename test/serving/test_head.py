"""A server with a trained head beside its drafter: the head decides which rows are verified, never what is emitted."""

from __future__ import annotations

from support import models
from support.calls import output_ids
from support.exact import greedy_ids, tokenizer_of
from support.servers import Server

PROMPTS = ("et", "tao", "aaaa", "o", "the cat sat on", "a red ball, e")


def test_text_is_the_target_s_own_whatever_the_head_says(headed: tuple[str, Server]) -> None:
    _, server = headed
    target = models.letters_target()
    expected = [greedy_ids(target, tokenizer_of(target)(p).input_ids, 48) for p in PROMPTS]
    try:
        for threshold in (0.0, 0.02, 0.3):
            server.set_options(threshold=threshold)
            answers = server.generate(list(PROMPTS), max_new_tokens=48, ignore_eos=True)
            assert output_ids(answers) == expected, threshold
    finally:
        server.set_options(threshold=0.0)


def test_the_server_says_which_survival_it_uses(headed: tuple[str, Server]) -> None:
    kind, server = headed
    server.generate("et", max_new_tokens=16, ignore_eos=True)
    state = server.internal_state()["d3tree"]
    assert state["survival"] == kind
    assert state["topk"] == 6  # what the head was made with
    assert f"the trained {kind} head" in server.log()
    assert 1.0 <= state["predicted_accept_length"] <= 24.0 and 1.0 <= state["accept_length"] <= 8.0
