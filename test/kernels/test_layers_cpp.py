"""The C++ layer kernels: as exact as float32 allows, rows independent, nothing written where not asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from built import ops_or_skip
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kernel_ext import cpu
from sgl_kernel_ext.dispatch import KERNELS
from sgl_kernel_ext.reference import kv, layers

CPP: dict[str, Callable[..., Any]] = {name: KERNELS[name]["cpp"] for name in (*cpu.LAYER_KERNELS, *cpu.KV_KERNELS)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from(DTYPES)
# Around the sixteen values of one vector.
sizes = st.sampled_from([1, 7, 15, 16, 17, 64, 100, 576])


@pytest.fixture(scope="module", autouse=True)
def needs_the_kernels() -> None:
    ops_or_skip("layers")


def rows_of(generator: torch.Generator, rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, size], a part of wider rows as a projection's output is."""
    return (torch.randn(rows, size + 3, generator=generator) * 3).to(dtype)[:, :size]


def assert_rounded(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """Within a few units in the last place of float32, or one rounding to the narrower type, of float64's result."""
    assert actual.dtype in DTYPES
    if actual.dtype == torch.float32:
        torch.testing.assert_close(actual.double(), exact, rtol=2e-6, atol=1e-6)
    else:
        step = torch.finfo(actual.dtype).eps * 0.51
        torch.testing.assert_close(actual.double(), exact, rtol=step, atol=1e-6)


@settings(max_examples=150, deadline=None)
@given(seed=seeds, rows=st.integers(0, 9), size=sizes, dtype=dtypes, threads=st.integers(1, 3))
def test_norms(seed: int, rows: int, size: int, dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(seed)
    x, residual = (rows_of(generator, rows, size, dtype) for _ in range(2))
    weight = torch.randn(size, generator=generator).to(dtype)
    assert_rounded(CPP["rms_norm"](x, weight, 1e-5), layers.rms_norm(x.double(), weight.double(), 1e-5).double())
    normed, total = CPP["add_rms_norm"](x, residual, weight, 1e-5)
    exact = (x.double() + residual.double()).float().double()
    assert torch.equal(total, (x.float() + residual.float()).to(dtype))
    scale = (exact.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert_rounded(normed, exact * scale * weight.double())


def test_norm_of_zeros_and_of_the_largest_values() -> None:
    x = torch.tensor([[0.0] * 64, [1e18] * 64, [-1e-30] * 64])
    normed = CPP["rms_norm"](x, torch.ones(64), 1e-6)
    torch.testing.assert_close(normed, layers.rms_norm(x, torch.ones(64), 1e-6))


@settings(max_examples=100, deadline=None)
@given(seed=seeds, rows=st.integers(0, 9), size=sizes, dtype=dtypes)
def test_activation(seed: int, rows: int, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = rows_of(generator, rows, 2 * size, dtype)
    gate, up = x.double().chunk(2, -1)
    assert_rounded(CPP["silu_and_mul"](x), torch.nn.functional.silu(gate) * up)


def test_activation_at_the_ends() -> None:
    gate = torch.tensor([0.0, -0.0, 80.0, -80.0, 1e30, -1e30, torch.inf, torch.nan])
    out = CPP["silu_and_mul"](torch.cat((gate, torch.ones(8)))[None])[0]
    assert out[:7].tolist()[:2] == [0.0, 0.0]
    torch.testing.assert_close(out[2:4], torch.nn.functional.silu(gate[2:4]))
    assert out[4] == gate[4] and abs(out[5]) < 1e-6 and out[6] == torch.inf and out[7].isnan()


@settings(max_examples=150, deadline=None)
@given(
    seed=seeds,
    rows=st.integers(0, 9),
    heads=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    half=st.sampled_from([1, 5, 8, 16, 20, 32]),
    unrotated=st.sampled_from([0, 2, 16]),
    multimodal=st.booleans(),
    neox=st.booleans(),
    dtype=dtypes,
    table_dtype=dtypes,
)
def test_rotation(seed, rows, heads, half, unrotated, multimodal, neox, dtype, table_dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    head_dim = 2 * half + unrotated
    q, k = (rows_of(generator, rows, count * head_dim, dtype) for count in heads)
    cos_sin = torch.randn(50, 2 * half, generator=generator).to(table_dtype)
    positions = torch.randint(0, 50, (3, rows) if multimodal else (rows,), generator=generator)
    axes = torch.randint(0, 3, (half,), generator=generator) if multimodal else None
    actual = CPP["rotate"](q, k, positions, cos_sin, head_dim, axes, neox)
    expected = layers.rotate(q, k, positions, cos_sin, head_dim, axes, neox)
    for ours, theirs in zip(actual, expected, strict=True):
        # A fused multiplication and addition rounds once where torch rounds twice.
        scale = 30 * (torch.finfo(dtype).eps if dtype != torch.float32 else 2e-7)
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=torch.finfo(dtype).eps, atol=scale)


def test_equal_axes_rotate_like_one_position() -> None:
    q, k, cos_sin = torch.randn(5, 128), torch.randn(5, 64), torch.randn(20, 64)
    positions = torch.randint(0, 20, (5,))
    one = CPP["rotate"](q, k, positions, cos_sin, 64, None, True)
    three = CPP["rotate"](q, k, positions.expand(3, -1), cos_sin, 64, torch.arange(32) % 3, True)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


@settings(max_examples=100, deadline=None)
@given(
    seed=seeds,
    rows=st.integers(0, 9),
    heads=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    normed=st.booleans(),
    value_dim=st.sampled_from([16, 24]),
    dtype=dtypes,
)
def test_fused_rotation_is_its_parts(seed, rows, heads, normed, value_dim, dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    q_heads, kv_heads = heads
    head_dim = 32
    qkv = rows_of(generator, rows, (q_heads + kv_heads) * head_dim + kv_heads * value_dim, dtype)
    cos_sin = torch.randn(50, head_dim, generator=generator)
    positions = torch.randint(0, 50, (rows,), generator=generator)
    slots = torch.randperm(20, generator=generator)[:rows]
    norms = [torch.randn(head_dim, generator=generator).to(dtype) if normed else None for _ in range(2)]
    results = []
    for implementation in (CPP["rotate_and_store"], layers.rotate_and_store):
        caches = torch.ones(20, kv_heads, head_dim, dtype=dtype), torch.ones(20, kv_heads, value_dim, dtype=dtype)
        q = implementation(qkv, q_heads, positions, cos_sin, None, True, *caches, slots, *norms, 1e-6)
        results.append((q, *caches))
    (q, keys, values), (expected_q, expected_keys, expected_values) = results
    scale = 60 * torch.finfo(dtype).eps
    torch.testing.assert_close(q, expected_q, rtol=scale, atol=scale)
    torch.testing.assert_close(keys, expected_keys, rtol=scale, atol=scale)
    assert torch.equal(values, expected_values)
    untouched = torch.ones(20).bool()
    untouched[slots] = False
    assert keys[untouched].eq(1).all() and values[untouched].eq(1).all()


@settings(max_examples=60, deadline=None)
@given(seed=seeds, dtype=dtypes, threads=st.integers(1, 3))
def test_a_row_does_not_depend_on_the_others(seed: int, dtype: torch.dtype, threads: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(300, 640, generator=generator).to(dtype) for _ in range(2))
    weight, cos_sin = torch.randn(640, generator=generator).to(dtype), torch.randn(300, 64, generator=generator)
    positions = torch.arange(300)
    row = int(torch.randint(0, 300, (), generator=generator))
    one = slice(row, row + 1)
    torch.set_num_threads(threads)

    def outputs(rows: slice) -> list[torch.Tensor]:
        normed, total = CPP["add_rms_norm"](x[rows], residual[rows], weight, 1e-5)
        q, k = CPP["rotate"](x[rows], residual[rows], positions[rows], cos_sin, 64, None, True)
        return [CPP["rms_norm"](x[rows], weight, 1e-5), normed, total, CPP["silu_and_mul"](x[rows]), q, k]

    for together, alone in zip(outputs(slice(None)), outputs(one), strict=True):
        assert torch.equal(together[one], alone)


@settings(max_examples=100, deadline=None)
@given(seed=seeds, rows=st.integers(0, 12), dtype=dtypes, threads=st.integers(1, 2))
def test_stored_rows(seed: int, rows: int, dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows, 400, generator=generator).to(dtype)
    k, v = wide[:, 10:202].view(rows, 3, 64), wide[:, 202:262].unflatten(1, (3, 20))
    slots = torch.randperm(30, generator=generator)[:rows]
    ours = torch.zeros(30, 3, 64, dtype=dtype), torch.zeros(30, 3, 20, dtype=dtype)
    theirs = ours[0].clone(), ours[1].clone()
    CPP["store_kv"](k, v, *ours, slots)
    kv.store_kv(k, v, *theirs, slots)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@settings(max_examples=150, deadline=None)
@given(seed=seeds, requests=st.integers(1, 5), moves=st.integers(0, 6), dtype=dtypes, threads=st.integers(1, 2))
def test_moves(seed: int, requests: int, moves: int, dtype: torch.dtype, threads: int) -> None:
    """Targets overlap sources of the same request, as the path of a tree does."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(seed)
    source = torch.stack([torch.randperm(8, generator=generator)[:moves].sort().values for _ in range(requests)])
    target = torch.arange(moves).expand(requests, -1)
    base = torch.randperm(requests, generator=generator).unsqueeze(1) * 8
    caches = [torch.randn(8 * requests, 2, 5 + i % 2, generator=generator).to(dtype) for i in range(20)]
    expected = [cache.clone() for cache in caches]
    kv.compact_kv(expected, base + target, base + source)
    CPP["compact_kv"](caches, base + target, base + source)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(caches, expected, strict=True))


@pytest.mark.parametrize("slot", [-1, 9])
def test_slots_outside_the_cache_are_refused(slot: int) -> None:
    cache, rows = torch.zeros(9, 1, 16), torch.ones(2, 1, 16)
    slots = torch.tensor([3, slot])
    qkv, table = torch.ones(2, 48), torch.ones(4, 16)
    for call in (
        lambda: CPP["store_kv"](rows, rows, cache, cache, slots),
        lambda: CPP["compact_kv"]([cache], slots, torch.tensor([1, 2])),
        lambda: CPP["compact_kv"]([cache], torch.tensor([1, 2]), slots),
        lambda: CPP["rotate_and_store"](
            qkv, 1, torch.zeros(2).long(), table, None, True, cache, cache, slots, None, None, 0.0
        ),
    ):
        with pytest.raises(IndexError):
            call()
    assert cache.eq(0).all()


@pytest.mark.parametrize("position", [-1, 4])
def test_positions_outside_the_table_are_refused(position: int) -> None:
    with pytest.raises(IndexError):
        CPP["rotate"](torch.ones(1, 16), torch.ones(1, 16), torch.tensor([position]), torch.ones(4, 16), 16, None, True)
