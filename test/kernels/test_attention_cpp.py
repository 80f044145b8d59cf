"""The C++ attention kernel against the reference, over shapes drawn at random and over the edges that matter."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from built import ops_or_skip
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kernel_ext import cpu
from sgl_kernel_ext.dispatch import get_kernel
from sgl_kernel_ext.reference import attention as reference

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(scope="module", autouse=True)
def needs_the_kernel() -> None:
    ops_or_skip("attention")


def random_tree_mask(rows: list[int], gen: torch.Generator) -> torch.Tensor:
    """[sum(rows) + 1, max(rows) + 1]: every node hangs under a random earlier row of its request."""
    mask = torch.zeros(sum(rows) + 1, max(rows) + 1, dtype=torch.bool)
    begin = 0
    for count in rows:
        for row in range(count):
            if row > 0:
                mask[begin + row] = mask[begin + int(torch.randint(row, (1,), generator=gen))]
            mask[begin + row, row] = True
        begin += count
    return mask


def make_case(
    prefixes: list[int],
    rows: list[int],
    *,
    heads: tuple[int, int] = (6, 2),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    mode: str = "causal",
    padding: int = 0,
    window: int = -1,
    logit_cap: float = 0.0,
    index_type: torch.dtype = torch.int32,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of one `paged_attention` call; slots are permuted and q, K and V are strided views."""
    gen = torch.Generator().manual_seed(seed)
    num_slots = sum(prefixes) + sum(rows) + 3
    longest = max(p + n for p, n in zip(prefixes, rows, strict=True))
    table = torch.zeros(len(rows) + 2, longest + 2, dtype=index_type)
    req_rows = torch.randperm(len(rows) + 2, generator=gen)[: len(rows)]
    slots = torch.randperm(num_slots, generator=gen)
    for request, (prefix, count) in enumerate(zip(prefixes, rows, strict=True)):
        own, slots = slots[: prefix + count], slots[prefix + count :]
        table[req_rows[request], : prefix + count] = own.to(index_type)
    cache_dtype = cache_dtype or dtype
    fused_kv = torch.randn(num_slots, heads[1], sum(dims), generator=gen).to(cache_dtype)
    fused_q = torch.randn(sum(rows) + padding, heads[0] * dims[0] + 5, generator=gen).to(dtype)
    return {
        "q": fused_q[:, 5:].view(-1, heads[0], dims[0]),
        "k_cache": fused_kv[..., : dims[0]],
        "v_cache": fused_kv[..., dims[0] :],
        "slot_table": table,
        "req_rows": req_rows,
        "prefix_lens": torch.tensor(prefixes, dtype=torch.int64),
        "row_offsets": torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int64),
        "scaling": dims[0] ** -0.5,
        "mode": mode,
        "ancestor_mask": random_tree_mask(rows, gen) if mode == "tree" else None,
        "logit_cap": logit_cap,
        "sliding_window": window,
    }


def assert_matches(case: dict[str, Any]) -> None:
    tolerance = TOLERANCE[case["q"].dtype]
    expected = reference.paged_attention(**case)
    torch.testing.assert_close(cpu.paged_attention(**case), expected, rtol=tolerance, atol=tolerance)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    requests = draw(st.integers(1, 5))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    mode = draw(st.sampled_from(["causal", "bidirectional", "tree"]))
    padding = draw(st.integers(0, 3)) if mode != "tree" else draw(st.integers(0, 1))
    return make_case(
        draw(st.lists(st.integers(0, 200), min_size=requests, max_size=requests)),
        draw(st.lists(st.integers(1, 70), min_size=requests, max_size=requests)),
        heads=(kv_heads * draw(st.sampled_from([1, 3, 8])), kv_heads),
        dims=(draw(st.sampled_from([16, 24, 64, 80, 128])), draw(st.sampled_from([16, 40, 64, 128]))),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        mode=mode,
        padding=padding,
        window=draw(st.sampled_from([-1, -1, 0, 5, 63, 90])),
        logit_cap=draw(st.sampled_from([0.0, 0.0, 1.5])),
        index_type=draw(st.sampled_from([torch.int32, torch.int64])),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=120, deadline=None)
@given(case=cases(), threads=st.integers(1, 3))
def test_random_shapes(case: dict[str, Any], threads: int) -> None:
    torch.set_num_threads(threads)
    assert_matches(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["causal", "bidirectional", "tree"])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_every_mode_type_and_group(dtype: torch.dtype, mode: str, group: int) -> None:
    assert_matches(make_case([0, 130, 7], [33, 1, 64], heads=(3 * group, 3), dtype=dtype, mode=mode))


@pytest.mark.parametrize("mode", ["causal", "tree"])
@pytest.mark.parametrize("window", [-1, 700])
def test_long_prefixes_split_over_threads(mode: str, window: int) -> None:
    torch.set_num_threads(4)
    assert_matches(make_case([2000], [12], mode=mode, window=window))


def test_decode_of_many_requests() -> None:
    lengths = [(37 * i) % 190 for i in range(40)]
    assert_matches(make_case(lengths, [1] * 40))


def test_requests_without_rows_and_an_empty_batch() -> None:
    assert_matches(make_case([5, 9, 0], [3, 0, 2], padding=2))
    case = make_case([5], [3])
    none = torch.empty(0, dtype=torch.int64)
    case |= {"req_rows": none, "prefix_lens": none, "row_offsets": torch.tensor([0])}
    assert cpu.paged_attention(**case).eq(0).all()


def test_row_without_visible_key_is_zero() -> None:
    case = make_case([0, 4], [3, 5], mode="tree")
    case["ancestor_mask"][0] = False
    assert cpu.paged_attention(**case)[0].eq(0).all()
    assert_matches(case)


def test_cache_of_another_type_than_the_queries() -> None:
    assert_matches(make_case([40, 3], [4, 6], dtype=torch.float32, cache_dtype=torch.bfloat16))


def test_large_logits_stay_finite() -> None:
    case = make_case([100], [40])
    case["q"] = case["q"] * 1e4
    assert_matches(case)


def test_a_row_does_not_depend_on_the_others_in_its_batch() -> None:
    """One thread splits no keys, so a request's bits are the same alone and in a batch."""
    torch.set_num_threads(1)
    case = make_case([150, 30, 80], [20, 1, 7])
    together = cpu.paged_attention(**case)
    for request in range(3):
        begin, end = case["row_offsets"][request : request + 2].tolist()
        alone = dict(case, q=case["q"][begin:end], row_offsets=torch.tensor([0, end - begin]))
        alone["req_rows"] = case["req_rows"][request : request + 1]
        alone["prefix_lens"] = case["prefix_lens"][request : request + 1]
        torch.testing.assert_close(cpu.paged_attention(**alone), together[begin:end], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"req_rows": torch.tensor([9])}, IndexError, "no row 9"),
        ({"slot_table": torch.full((3, 20), 99)}, IndexError, "names slot 99"),
        ({"slot_table": torch.full((3, 20), -1)}, IndexError, "names slot -1"),
        ({"slot_table": torch.zeros(3, 5, dtype=torch.int32)}, ValueError, "longer than a row"),
        ({"slot_table": torch.zeros(3, 20)}, TypeError, "int32 or int64"),
        ({"row_offsets": torch.tensor([0, 5])}, ValueError, "fewer rows"),
        ({"row_offsets": torch.tensor([1, 3])}, ValueError, "start at 0"),
        ({"prefix_lens": torch.tensor([-1])}, ValueError, "prefix of -1"),
        ({"mode": "tree", "ancestor_mask": torch.ones(3, 2).bool()}, ValueError, "more than its ancestor mask"),
        ({"mode": "tree", "ancestor_mask": torch.ones(2, 3).bool()}, ValueError, "mask has fewer rows"),
        ({"mode": "tree"}, ValueError, "ancestor mask is required"),
    ],
)
def test_bad_arguments_raise(change: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        cpu.paged_attention(**make_case([10], [3]) | change)


def test_the_table_prefers_cpp() -> None:
    assert get_kernel("paged_attention", "cpu") is cpu.paged_attention


def test_without_a_compiler_the_reference_answers_after_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    cpu.load_ops.cache_clear()
    cpu.attention_ops.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                case = make_case([10], [3])
                assert_matches(case)
    finally:
        cpu.load_ops.cache_clear()
        cpu.attention_ops.cache_clear()
    ours = [warning for warning in caught if "slow torch reference" in str(warning.message)]
    assert len(ours) == 1


@pytest.mark.slow
def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    code = "from sgl_kernel_ext import cpu; cpu.load_ops('attention').paged_attention"
    starts = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [process.wait(timeout=300) for process in starts] == [0, 0, 0]
    assert len(list(tmp_path.rglob("*.so"))) == 1
