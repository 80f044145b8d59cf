"""Options: one declaration, three ways to give a value, errors that name the flag."""

from __future__ import annotations

import argparse
import pickle
from types import SimpleNamespace

import pytest

from sglang_d3tree import config
from sglang_d3tree.config import OPTIONS, D3TreeOptions, option_named, options_of
from sglang_d3tree.runtime.http_routes import wire_values


def test_defaults_are_within_their_own_limits() -> None:
    assert D3TreeOptions().replace(**{o.name: o.default for o in OPTIONS}) == D3TreeOptions()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("policy", "greedy"),
        ("max_rows", 0),
        ("max_rows", 2.5),
        ("max_rows", True),
        ("max_rows", "many"),
        ("topk", -1),
        ("head", "bilinear"),
        ("threshold", 1.5),
        ("threshold", -0.1),
        ("threshold", float("nan")),
    ],
)
def test_a_wrong_value_is_refused_by_a_sentence_with_its_flag(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=option_named(name).flag):
        D3TreeOptions().replace(**{name: value})


def test_flags_beat_the_environment_and_the_environment_beats_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    server_args = SimpleNamespace()
    monkeypatch.setenv("SGLANG_D3TREE_MAX_ROWS", "16")
    monkeypatch.setenv("SGLANG_D3TREE_TOPK", "4")
    config.remember(server_args, {"max_rows": "24"})
    options = options_of(server_args)
    assert (options.max_rows, options.topk, options.policy) == (24, 4, "d3tree")


def test_a_wrong_environment_value_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_D3TREE_THRESHOLD", "high")
    with pytest.raises(ValueError, match="--speculative-d3tree-threshold expects float"):
        options_of(SimpleNamespace())


def test_parsed_flags_survive_the_way_to_a_child_process() -> None:
    parser = argparse.ArgumentParser()
    config.add_cli_args(parser)
    namespace = parser.parse_args(["--speculative-d3tree-policy", "chain"])
    server_args = SimpleNamespace()
    config.remember(server_args, config.take_from_namespace(namespace))
    assert options_of(pickle.loads(pickle.dumps(server_args))).policy == "chain"


def test_engine_keywords_are_taken_out_of_sglangs() -> None:
    keywords = {"model_path": "m", "speculative_d3tree_topk": 3}
    assert config.take_from_keywords(keywords) == {"topk": 3}
    assert keywords == {"model_path": "m"}


def test_every_option_has_help_text_and_shows_its_default() -> None:
    parser = argparse.ArgumentParser()
    config.add_cli_args(parser)
    text = " ".join(parser.format_help().split())
    for option in OPTIONS:
        assert option.flag in text
        assert f"Default: {option.default}" in text


def test_numbers_on_the_wire_come_back_as_the_values_they_stand_for() -> None:
    for option, value in ((option_named("policy"), "caddtree"), (option_named("threshold"), 0.25)):
        assert option.from_wire(option.to_wire(value)) == value
    with pytest.raises(ValueError, match="0 = d3tree"):
        option_named("policy").from_wire(9)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "JSON object"),
        ({}, "JSON object"),
        ({"speed": 3}, "Unknown"),
        ({"max_rows": 8}, "fixed at start-up"),
        ({"policy": "best"}, "must be one of"),
    ],
)
def test_a_wrong_body_of_the_options_route_is_explained(body: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wire_values(body)
