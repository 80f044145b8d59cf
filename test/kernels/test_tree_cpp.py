"""The C++ tree kernels against the reference: integers and survival bit by bit, log-probabilities within rounding."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from built import ops_or_skip
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tree_accept import random_rows, target_for
from test_tree_budget import kinds, random_survival, trees
from test_tree_build import random_candidates, random_edges
from torch._subclasses.fake_tensor import FakeTensorMode

from sgl_kernel_ext import cpu
from sgl_kernel_ext.dispatch import KERNELS, get_kernel
from sgl_kernel_ext.reference import tree as reference
from sglang_d3tree.tree.build import CandidateTree

CPP: dict[str, Callable[..., Any]] = {name: KERNELS[name]["cpp"] for name in cpu.TREE_KERNELS}
seeds = st.integers(0, 2**31)


@pytest.fixture(scope="module", autouse=True)
def needs_the_kernels() -> None:
    ops_or_skip("tree")


def assert_same(name: str, *args: Any) -> None:
    """Same dtypes, shapes and bits (the sign of zero aside)."""
    expected, actual = getattr(reference, name)(*args), CPP[name](*args)
    if isinstance(expected, torch.Tensor):
        expected, actual = (expected,), (actual,)
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def assert_same_candidates(logits: torch.Tensor, topk: int, horizons: torch.Tensor) -> None:
    ids, log_probs = CPP["draft_candidates"](logits, topk, horizons)
    expected_ids, expected = reference.draft_candidates(logits, topk, horizons)
    assert ids.dtype == torch.int64 and torch.equal(ids, expected_ids)
    # The reference sums in float32; both lie within this of the exact value.
    torch.testing.assert_close(log_probs, expected, atol=2e-6, rtol=1e-6)
    exact = logits.double().log_softmax(-1).gather(-1, ids).float()
    exact = exact.where(expected > -torch.inf, -torch.inf)
    torch.testing.assert_close(log_probs, exact, atol=5e-7, rtol=2e-7)


# Sizes around the 64 entries of one comparison and the 1024 of one chunk.
@settings(max_examples=150, deadline=None)
@given(
    seed=seeds,
    requests=st.integers(1, 3),
    horizon=st.integers(1, 4),
    vocabulary=st.sampled_from([1, 5, 63, 64, 65, 200, 640, 1023, 1024, 1025, 3000]),
    topk=st.integers(1, 70),
    levels=st.sampled_from([None, 0, 3, 20]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    threads=st.integers(1, 3),
)
def test_candidates(seed, requests, horizon, vocabulary, topk, levels, dtype, threads) -> None:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(requests, horizon, vocabulary, generator=generator) * 4
    if levels == 0:
        logits = logits.round()  # ties, and both zeros
    elif levels:
        logits = (logits.sigmoid() * levels).floor()
    logits = logits.masked_fill(torch.rand(logits.shape, generator=generator) < 0.2, -torch.inf)
    horizons = torch.randint(0, horizon + 1, (requests,), generator=generator)
    assert_same_candidates(logits.to(dtype), topk, horizons)


def test_candidates_of_extreme_logits() -> None:
    rising = torch.arange(5000.0) / 10  # every entry becomes the best one; the sum is rescaled all the way
    far = torch.full((5000,), -1e4)
    far[3777] = 1e4
    nothing = torch.full((5000,), -torch.inf)
    one = nothing.clone()
    one[4999] = -3.0
    logits = torch.stack((rising, rising.flip(0), far, nothing, one, torch.zeros(5000)))[None]
    assert_same_candidates(logits, 16, torch.tensor([6]))
    assert_same_candidates(logits.transpose(0, 1), 16, torch.tensor([1] * 6))  # not contiguous


def test_a_broken_draft_proposes_nothing() -> None:
    logits = torch.randn(1, 5, 3000)
    logits[0, 1, 1700] = torch.nan
    logits[0, 2, 1700] = torch.inf
    logits[0, 3] = torch.nan
    ids, log_probs = CPP["draft_candidates"](logits, 8, torch.tensor([5]))
    assert log_probs[0, [0, 4]].isfinite().all() and (log_probs[0, 1:4] == -torch.inf).all()
    assert ids.sort(-1).values.diff(dim=-1).gt(0).all() and ids.ge(0).all() and ids.lt(3000).all()
    assert torch.equal(ids[0, 2], reference.draft_candidates(logits, 8, torch.tensor([5]))[0][0, 2])


@settings(max_examples=200, deadline=None)
@given(
    seed=seeds,
    requests=st.integers(1, 10),
    horizon=st.integers(0, 6),
    topk=st.integers(1, 9),
    max_rows=st.integers(1, 50),
    levels=st.sampled_from([None, 1, 4]),
    kind=st.sampled_from(["draft", "shuffled", "per parent"]),
)
def test_trees(seed, requests, horizon, topk, max_rows, levels, kind) -> None:
    candidates = random_candidates(seed, requests, horizon, topk, levels)
    log_probs = candidates.log_probs.unsqueeze(2)
    if kind == "shuffled":  # the reference does not ask for sorted candidates
        log_probs = log_probs[..., torch.randperm(topk)]
    elif kind == "per parent":
        log_probs = random_edges(seed, candidates, levels).log_survival
    assert_same("build_tree", candidates.token_ids, log_probs, torch.arange(requests) + 1000, max_rows)


@settings(max_examples=100, deadline=None)
@given(tree=trees, seed=seeds, kind=st.sampled_from(["smooth", "nan"]))
def test_survival(tree: CandidateTree, seed: int, kind: str) -> None:
    conditional = torch.rand(tree.valid.shape, generator=torch.Generator().manual_seed(seed))
    if kind == "nan":
        conditional[:, ::3] = torch.nan
    assert_same("path_product", conditional * tree.valid, tree.parents, tree.horizon)


@settings(max_examples=150, deadline=None)
@given(tree=trees, seed=seeds, kind=kinds, threshold=st.floats(0, 1), total=st.integers(1, 130), broken=st.booleans())
def test_choice_of_rows(tree: CandidateTree, seed: int, kind: str, threshold: float, total: int, broken: bool) -> None:
    survival = random_survival(tree, seed, kind)
    keep = torch.rand(survival.shape, generator=torch.Generator().manual_seed(seed)) >= threshold
    keep |= ~tree.valid  # invalid rows must not come through, nor take a valid one's place
    if broken:
        survival[:, ::4] = torch.nan
        survival[:, 1::4] = -0.0
        survival[:, 2::4] = 2.0
    assert_same("fill_rows", survival, tree.depths, tree.valid, keep, total)


@settings(max_examples=120, deadline=None)
@given(tree=trees, seed=seeds, threshold=st.floats(0, 0.5), padding=st.integers(0, 9))
def test_layout_and_matching_children(tree: CandidateTree, seed: int, threshold: float, padding: int) -> None:
    rows, keep = random_rows(tree, seed, threshold, padding)
    capacity = rows.token_ids.shape[0]
    assert_same("layout_rows", tree.token_ids, tree.parents, tree.depths, keep, capacity, tree.horizon)
    assert_same("matching_child", rows.token_ids, rows.parent, target_for(rows, seed))


def test_what_the_reference_cannot_check_raises() -> None:
    keep = torch.tensor([[True, True, True], [True, False, True]])
    zeros = torch.zeros(2, 3, dtype=torch.int64)
    parents = torch.tensor([[0, 0, 1], [0, 0, 1]])
    with pytest.raises(ValueError, match="without its parent"):
        CPP["layout_rows"](zeros, parents, zeros, keep, 9, 2)
    with pytest.raises(ValueError, match="more than 2 rows"):
        CPP["layout_rows"](zeros, parents, zeros, keep, 2, 2)
    with pytest.raises(IndexError):
        CPP["path_product"](torch.rand(2, 3), parents + 2, 2)
    with pytest.raises(IndexError):
        CPP["matching_child"](torch.zeros(2).long(), torch.tensor([0, 2]), torch.zeros(2).long())


def test_sizes_that_cannot_be_ordered_raise_as_in_the_reference() -> None:
    nothing, many = torch.zeros(0, 9, 1, 1 << 15), torch.zeros(1).expand(1 << 12, 1 << 11)
    for kernel in (reference.build_tree, CPP["build_tree"]):
        with pytest.raises(ValueError, match="32 bits"):
            kernel(nothing[:, :, 0].long(), nothing, torch.zeros(0).long(), 1 << 14)
    for kernel in (reference.fill_rows, CPP["fill_rows"]):
        with pytest.raises(ValueError, match="can order"):
            kernel(many, many.long(), many.bool(), many.bool(), 1 << 12)


def test_a_trainer_gets_gradients() -> None:
    conditional = torch.rand(1, 4, requires_grad=True)
    survival = CPP["path_product"](conditional, torch.tensor([[0, 0, 1, 2]]), 3)
    survival.sum().backward()
    assert conditional.grad is not None and conditional.grad[0, 1:].gt(0).all()


def test_fake_tensors_get_the_shapes() -> None:
    candidates = random_candidates(1, 3, 4, 5)
    tree = CPP["build_tree"](candidates.token_ids, candidates.log_probs[:, :, None], torch.arange(3), 8)
    survival, (tokens, parents, depths, *_, valid) = torch.rand(3, 8), tree
    calls = {
        "draft_candidates": (torch.randn(3, 4, 100), 7, candidates.horizons),
        "build_tree": (candidates.token_ids, candidates.log_probs[:, :, None], torch.arange(3), 8),
        "path_product": (survival, parents, 4),
        "fill_rows": (survival, depths, valid, valid, 10),
        "layout_rows": (tokens, parents, depths, valid, 24, 4),
        "matching_child": (torch.arange(5), torch.zeros(5).long(), torch.arange(5)),
    }
    for name, arguments in calls.items():
        real = CPP[name](*arguments)
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fake = CPP[name](*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments))
        for ours, theirs in zip(*([x] if isinstance(x, torch.Tensor) else x for x in (fake, real)), strict=True):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), name


def test_the_table_prefers_cpp_and_imports_build_nothing(tmp_path: Path) -> None:
    assert all(get_kernel(name, "cpu") is kernel for name, kernel in CPP.items())
    code = (
        "import sys, sglang_d3tree.tree.build, sglang_d3tree.tree.accept\n"
        "from sgl_kernel_ext.dispatch import get_kernel\n"
        "assert 'sgl_kernel_ext.cpu' not in sys.modules\n"
        "get_kernel('build_tree', 'cpu')\n"
        "assert 'triton' not in sys.modules and sys.modules['sgl_kernel_ext.cpu'].load_ops.cache_info().misses == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_without_a_compiler_the_reference_answers_after_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def forget() -> None:
        for cached in (cpu.load_ops, cpu.attention_ops, cpu.tree_ops, cpu.head_ops):
            cached.cache_clear()

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(cpu, "_warned", False)
    forget()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert not cpu.build_all()
            assert_same_candidates(torch.randn(2, 3, 100), 4, torch.tensor([3, 3]))
    finally:
        forget()
    assert len([warning for warning in caught if "slow torch reference" in str(warning.message)]) == 1
