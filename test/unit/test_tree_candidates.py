import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_d3tree.tree.candidates import draft_candidates


def reference(logits: torch.Tensor, topk: int):
    """Sort the whole vocabulary: log-probability descending, token id ascending."""
    log_probs = torch.log_softmax(logits.double(), dim=-1)
    order = torch.sort(logits.float(), dim=-1, descending=True, stable=True).indices[..., :topk]
    return order, log_probs.gather(-1, order).float()


# 64 is the chunk of the two-stage search: sizes on both sides of its multiples, and fewer chunks than candidates.
@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    requests=st.integers(1, 3),
    horizon=st.integers(1, 4),
    vocabulary=st.sampled_from([1, 5, 63, 64, 65, 200, 511, 640, 1000]),
    topk=st.integers(1, 12),
    levels=st.sampled_from([None, 0, 3, 20]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_matches_a_full_sort(seed, requests, horizon, vocabulary, topk, levels, dtype):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(requests, horizon, vocabulary, generator=generator) * 4
    if levels == 0:  # ties in the middle, a few distinct logits on top
        logits = logits.round()
    elif levels:  # few distinct logits: nearly everything is a tie
        logits = (logits.sigmoid() * levels).floor()
    logits = logits.to(dtype)
    token_ids, log_probs = reference(logits, topk)
    candidates = draft_candidates(logits, topk)
    assert candidates.token_ids.dtype == torch.int64 and candidates.log_probs.dtype == torch.float32
    assert torch.equal(candidates.token_ids, token_ids)
    torch.testing.assert_close(candidates.log_probs, log_probs, atol=2e-6, rtol=1e-5)
    assert torch.equal(candidates.horizons, torch.full((requests,), horizon))


def test_depths_beyond_the_horizon_are_impossible():
    candidates = draft_candidates(torch.randn(3, 5, 100), 4, torch.tensor([0, 2, 5]))
    finite = candidates.log_probs.isfinite().all(-1)
    assert finite.tolist() == [[False] * 5, [True] * 2 + [False] * 3, [True] * 5]
    assert (candidates.log_probs <= 0).all()


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_draft_proposes_nothing(broken):
    logits = torch.randn(1, 2, 300)
    logits[0, 1, 17] = broken
    candidates = draft_candidates(logits, 4)
    assert candidates.log_probs[0, 0].isfinite().all()
    assert (candidates.log_probs[0, 1] == -torch.inf).all()
    assert ((candidates.token_ids >= 0) & (candidates.token_ids < 300)).all()


def test_banned_tokens_come_last_and_are_impossible():
    logits = torch.full((1, 1, 200), -torch.inf)
    logits[0, 0, [7, 150]] = torch.tensor([1.0, 2.0])
    candidates = draft_candidates(logits, 3)
    assert candidates.token_ids[0, 0, :2].tolist() == [150, 7]
    assert candidates.log_probs[0, 0, 2] == -torch.inf


def test_the_two_zeros_are_equal():
    logits = torch.full((1, 1, 200), -1.0)
    logits[0, 0, [3, 100]] = torch.tensor([-0.0, 0.0])
    assert draft_candidates(logits, 3).token_ids.tolist() == [[[3, 100, 0]]]


def test_errors():
    with pytest.raises(ValueError):
        draft_candidates(torch.zeros(3, 5), 2)
    with pytest.raises(ValueError):
        draft_candidates(torch.zeros(1, 3, 5), 0)
