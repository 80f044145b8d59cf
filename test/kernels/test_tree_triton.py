"""The Triton tree kernels without a GPU: the reference's results in Triton's interpreter, and machine code.

Triton reads TRITON_INTERPRET when a kernel is defined. The interpreter tests therefore run when the variable is set,
and one test without it runs them in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tree_accept import random_rows, target_for
from test_tree_budget import kinds, random_survival, trees
from test_tree_build import random_candidates, random_edges

from sgl_kernel_ext import dispatch
from sgl_kernel_ext.reference import kv, tree
from sglang_d3tree.tree.build import CandidateTree

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from sgl_kernel_ext import triton_kernels  # noqa: E402
from sgl_kernel_ext.triton_kernels import candidates, rows  # noqa: E402
from sgl_kernel_ext.triton_kernels import trees as tree_kernels  # noqa: E402
from sgl_kernel_ext.triton_kernels.kv import compact_kv_kernel  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of test_in_the_interpreter")
compiled = pytest.mark.skipif(INTERPRETED, reason="needs kernels that are not interpreted")
few = settings(max_examples=10, deadline=None, derandomize=True)
fewest = settings(few, max_examples=6)  # a tl.topk takes the interpreter a tenth of a second
seeds = st.integers(0, 2**31)


@compiled
def test_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


def assert_same(name: str, *args: Any) -> None:
    expected, actual = getattr(tree, name)(*args), getattr(triton_kernels, name)(*args)
    if isinstance(expected, torch.Tensor):
        expected, actual = (expected,), (actual,)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def assert_same_candidates(logits: torch.Tensor, topk: int, horizons: torch.Tensor) -> None:
    ids, log_probs = triton_kernels.draft_candidates(logits, topk, horizons)
    expected_ids, expected = tree.draft_candidates(logits, topk, horizons)
    assert ids.dtype == torch.int64 and torch.equal(ids, expected_ids)
    torch.testing.assert_close(log_probs, expected, atol=2e-6, rtol=1e-6)


# Sizes around a chunk (64 entries) and a program of the first stage (4096).
@interpreter
@fewest
@given(
    seed=seeds,
    vocabulary=st.sampled_from([1, 5, 64, 65, 1000, 4096, 5000]),
    topk=st.integers(1, 20),
    levels=st.sampled_from([None, 0, 5]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_candidates(seed: int, vocabulary: int, topk: int, levels: int | None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 2, vocabulary, generator=generator) * 4
    if levels == 0:
        logits = logits.round()  # ties, and both zeros
    elif levels:
        logits = (logits.sigmoid() * levels).floor()
    logits = logits.masked_fill(torch.rand(logits.shape, generator=generator) < 0.2, -torch.inf)
    assert_same_candidates(logits.to(dtype), topk, torch.tensor([1]))


@interpreter
def test_candidates_of_extreme_logits() -> None:
    far = torch.full((5000,), -1e4)
    far[4777] = 1e4
    nothing = torch.full((5000,), -torch.inf)
    zeros = torch.full((5000,), -1.0)
    zeros[[3, 70, 100, 4900]] = torch.tensor([-0.0, 0.0, -0.0, 0.0])  # equal, within a chunk and between chunks
    logits = torch.stack((torch.arange(5000.0) / 10, far, nothing, zeros))
    assert_same_candidates(logits[None], 4, torch.tensor([4]))


@interpreter
def test_a_broken_draft_proposes_nothing() -> None:
    logits = torch.randn(1, 4, 4200)
    logits[0, 1, 1700] = torch.nan
    logits[0, 2, 4170] = torch.inf
    logits[0, 3] = torch.nan
    ids, log_probs = triton_kernels.draft_candidates(logits, 4, torch.tensor([4]))
    assert log_probs[0, 0].isfinite().all() and (log_probs[0, 1:] == -torch.inf).all()
    assert ids.sort(-1).values.diff(dim=-1).gt(0).all() and ids.ge(0).all() and ids.lt(4200).all()


@interpreter
@fewest
@given(
    seed=seeds,
    requests=st.integers(1, 2),
    horizon=st.integers(0, 4),
    topk=st.integers(1, 6),
    max_rows=st.integers(1, 17),
    levels=st.sampled_from([None, 1, 4]),
    kind=st.sampled_from(["draft", "shuffled", "per parent"]),
)
def test_trees(
    seed: int, requests: int, horizon: int, topk: int, max_rows: int, levels: int | None, kind: str
) -> None:
    made = random_candidates(seed, requests, horizon, topk, levels)
    log_probs = made.log_probs.unsqueeze(2)
    if kind == "shuffled":
        log_probs = log_probs.flip(-1)
    elif kind == "per parent":
        log_probs = random_edges(seed, made, levels).log_survival
    assert_same("build_tree", made.token_ids, log_probs, torch.arange(requests) + 1000, max_rows)


@interpreter
@few
@given(tree=trees, seed=seeds, kind=kinds, threshold=st.floats(0, 1), total=st.integers(1, 130))
def test_survival_and_choice_of_rows(tree: CandidateTree, seed: int, kind: str, threshold: float, total: int) -> None:
    conditional = torch.rand(tree.valid.shape, generator=torch.Generator().manual_seed(seed)) * tree.valid
    assert_same("path_product", conditional, tree.parents, tree.horizon)
    survival = random_survival(tree, seed, kind)
    keep = torch.rand(survival.shape, generator=torch.Generator().manual_seed(seed)) >= threshold  # invalid ones too
    survival[:, ::5] = torch.nan
    survival[:, 1::5] = -0.0
    assert_same("fill_rows", survival, tree.depths, tree.valid, keep, total)


@interpreter
def test_an_invalid_row_takes_no_place() -> None:
    depths, valid = torch.tensor([[0, 1, 0]]), torch.tensor([[True, True, False]])
    keep = torch.tensor([[True, False, True]])
    assert triton_kernels.fill_rows(torch.zeros(1, 3), depths, valid, keep, 2).tolist() == valid.tolist()


def assert_same_layout(tree: CandidateTree, keep: torch.Tensor, capacity: int) -> None:
    arguments = (tree.token_ids, tree.parents, tree.depths, keep, capacity, tree.horizon)
    assert_same("layout_rows", *arguments)
    layout, packed = triton_kernels.rows.layout_rows_packed(*arguments)
    columns = torch.arange(keep.shape[1])
    unpacked = (packed[:, columns // 64] >> (columns % 64)) & 1
    assert torch.equal(unpacked.bool(), layout[6])


@interpreter
@few
@given(tree=trees, seed=seeds, threshold=st.floats(0, 0.3), padding=st.integers(0, 40))
def test_layout_and_matching_children(tree: CandidateTree, seed: int, threshold: float, padding: int) -> None:
    made, keep = random_rows(tree, seed, threshold, padding)
    assert_same_layout(tree, keep, made.token_ids.shape[0])
    assert_same("matching_child", made.token_ids, made.parent, target_for(made, seed))


@interpreter
def test_a_tree_wider_than_one_word_of_its_mask() -> None:
    made = random_candidates(3, 2, 6, 8)
    wide = CandidateTree(*tree.build_tree(made.token_ids, made.log_probs[:, :, None], torch.arange(2), 100), 6)
    assert wide.valid[:, 70].any()
    assert_same_layout(wide, wide.valid, 230)


@interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kv_moves_over_their_own_sources(dtype: torch.dtype) -> None:
    """Request 0 shifts slots down into each other, 1 reverses them, 2 moves nothing; rows of two sizes."""
    caches = [torch.randn(40, 2, dim).to(dtype) for dim in (48, 48, 6, 6)]
    target = torch.tensor([[10, 11, 12, 13, 14], [24, 23, 22, 21, 20], [30, 30, 30, 30, 30]])
    source = torch.tensor([[10, 12, 13, 14, 17], [20, 21, 22, 23, 24], [30, 30, 30, 30, 30]])
    expected = [cache.clone() for cache in caches]
    kv.compact_kv(expected, target, source)
    triton_kernels.compact_kv(caches, target, source)
    for ours, theirs in zip(caches, expected, strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="32-bit"):
        triton_kernels.compact_kv([torch.zeros(4, 3, dtype=torch.bfloat16)], target, source)


@compiled
def test_the_table_offers_them_for_cuda() -> None:
    for name in ("draft_candidates", "build_tree", "path_product", "fill_rows", "layout_rows", "matching_child"):
        assert dispatch.get_kernel(name, "cuda") is getattr(triton_kernels, name)
    assert dispatch.get_kernel("compact_kv", "cuda") is triton_kernels.compact_kv
    assert dispatch.get_kernel("compact_kv", "cpu") is dispatch.KERNELS["compact_kv"]["cpp"]


# Types of the arguments in order (constants left out), then the constants; the sizes are those of a real round:
# a vocabulary of 152k, 16 candidates, up to 64 rows.
LONG, INT, FLOAT, BOOL = "*i64", "i32", "*fp32", "*i1"
KERNELS: dict[str, tuple[Callable[..., Any], list[str], dict[str, int]]] = {
    "summarise": (candidates.summarise_kernel, ["*bf16", FLOAT, FLOAT, FLOAT, INT, INT], {"CHUNK": 64, "CHUNKS": 64}),
    "select": (
        candidates.select_kernel,
        ["*bf16", FLOAT, FLOAT, FLOAT, LONG, LONG, FLOAT, INT, INT, INT, INT],
        {"K": 16, "CHUNK": 64, "CHUNKS": 64, "MAXIMA": 4096, "PARTS": 64},
    ),
    "build_tree": (
        tree_kernels.build_tree_kernel,
        [LONG, FLOAT, LONG, LONG, LONG, LONG, LONG, FLOAT, BOOL, INT, INT, INT],
        {"W": 32, "K": 16, "PER_PARENT": 1},
    ),
    "path_product": (tree_kernels.path_product_kernel, [FLOAT, LONG, FLOAT, INT, INT], {"N": 64}),
    "fill_keys": (rows.fill_keys_kernel, [FLOAT, LONG, BOOL, BOOL, LONG, INT, INT], {"BLOCK": 256}),
    "layout": (
        rows.layout_kernel,
        [LONG, LONG, LONG, BOOL, *[LONG] * 7, BOOL, BOOL, INT, INT, INT, INT],
        {"N": 64, "WORDS": 1},
    ),
    "matching_child": (rows.matching_child_kernel, [LONG, LONG, LONG, LONG, INT], {"BLOCK": 256}),
    "compact_kv": (compact_kv_kernel, [LONG, LONG, LONG, INT, INT], {"M": 16, "BLOCK": 256}),
}


@compiled
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_to_machine_code(name: str, capability: int) -> None:
    kernel, types, constants = KERNELS[name]
    names: list[str] = kernel.arg_names  # type: ignore[attr-defined]
    signature = dict(zip([n for n in names if n not in constants], types, strict=True))
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, {n: signature[n] for n in names}, {(names.index(n),): v for n, v in constants.items()})
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert binary.asm["cubin"][:4] == b"\x7fELF"
    assert f"sm_{capability}" in binary.asm["ptx"]
