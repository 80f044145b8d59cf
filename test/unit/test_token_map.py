"""The reduced draft vocabulary: counted from answers, written as SGLang reads it, candidates in full ids."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_d3tree.runtime.token_map import FILE_NAME, read_token_map
from sglang_d3tree.train.answers import Conversation
from sglang_d3tree.train.shards import save_shard
from sglang_d3tree.train.token_map import answer_counts, build_token_map, coverage, hot_tokens
from sglang_d3tree.tree.candidates import draft_candidates


def conversation(tokens: list[int], prompt_length: int, held_out: bool = False) -> Conversation:
    hidden = torch.zeros(len(tokens), 2)
    return Conversation(
        tokens=tokens, prompt_length=prompt_length, temperature=0.0, kind="list", held_out=held_out, hidden=hidden,
        final=hidden,
    )  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> Path:
    save_shard(tmp_path / "shard-00000.safetensors", [conversation([9, 9, 9, 5, 5, 7], 3), conversation([8, 5], 1)])
    save_shard(
        tmp_path / "shard-00001.safetensors", [conversation([1, 7, 6], 1), conversation([1, 40, 5], 1, held_out=True)]
    )
    return tmp_path


def test_only_answers_of_training_conversations_count(data: Path):
    shards = sorted(data.glob("*.safetensors"))
    assert answer_counts(shards, held_out=False) == {5: 3, 7: 2, 6: 1}
    assert answer_counts(shards, held_out=True) == {40: 1, 5: 1}


@given(st.dictionaries(st.integers(0, 60), st.integers(1, 9), min_size=1), st.integers(1, 80))
def test_the_hottest_tokens_are_taken_and_small_ids_fill_up(counts, size):
    tokens = hot_tokens(Counter(counts), size)
    assert tokens == sorted(set(tokens)) and len(tokens) == size
    taken = [counts[t] for t in tokens if t in counts]
    left = [count for token, count in counts.items() if token not in tokens]
    assert not left or min(taken) >= max(left)
    if len(counts) <= size:
        fillers = [t for t in tokens if t not in counts]
        assert all(t in tokens for t in range(max(fillers, default=0)))


def test_a_map_beside_the_drafter_is_used_unless_told_otherwise(data: Path, tmp_path: Path):
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    assert read_token_map(None, str(drafter), 50) is None
    build_token_map(data, 3, drafter / FILE_NAME)
    build_token_map(data, 2, tmp_path / "other.pt")
    assert read_token_map(None, str(drafter), 50).tolist() == [5, 6, 7]
    assert read_token_map(str(tmp_path / "other.pt"), str(drafter), 50).tolist() == [5, 7]
    assert read_token_map("none", str(drafter), 50) is None


@pytest.mark.parametrize("content", [[-1, 3], [3, 50], [], "text"])
def test_a_map_of_other_tokens_is_refused_naming_the_flag(tmp_path: Path, content):
    path = tmp_path / "map.pt"
    torch.save(content, path)
    with pytest.raises(ValueError, match="--speculative-token-map"):
        read_token_map(str(path), str(tmp_path), 50)


def test_no_data_no_map(tmp_path: Path):
    with pytest.raises(ValueError, match="d3tree data generate"):
        build_token_map(tmp_path, 10, tmp_path / "map.pt")


def test_coverage_is_the_share_of_occurrences():
    assert coverage(Counter({1: 3, 2: 1}), [1]) == 0.75 and coverage(Counter(), [1]) == 1.0


def test_candidates_of_a_reduced_head_are_those_of_the_whole_one_restricted():
    torch.manual_seed(0)
    logits = torch.randn(3, 4, 200)
    token_map = torch.randperm(200)[:40].sort().values
    reduced = draft_candidates(logits[..., token_map], 5, token_map=token_map)
    masked = torch.full_like(logits, -torch.inf).index_copy(2, token_map, logits[..., token_map])
    whole = draft_candidates(masked, 5)
    assert torch.equal(reduced.token_ids, whole.token_ids)
    torch.testing.assert_close(reduced.log_probs, whole.log_probs)
