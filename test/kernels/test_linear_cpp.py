"""The C++ matrix products: as exact as torch's, for every shape, and the same for a row alone as in a crowd."""

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
from sgl_kernel_ext.reference import linear

CPP: dict[str, Callable[..., Any]] = {name: KERNELS[name]["cpp"] for name in cpu.LINEAR_KERNELS}
seeds = st.integers(0, 2**31)


def supported() -> list[torch.dtype]:
    ops = ops_or_skip("linear")
    return [dtype for dtype in linear.PACKED_DTYPES if ops.can_pack(dtype)]


dtypes = st.sampled_from(supported())


@settings(max_examples=200, deadline=None)
@given(
    seed=seeds,
    rows=st.one_of(st.integers(0, 14), st.sampled_from([95, 96, 97, 200])),
    inputs=st.sampled_from([1, 2, 7, 127, 128, 129, 300]),
    outputs=st.sampled_from([1, 15, 16, 17, 63, 64, 65, 130, 200]),
    biased=st.booleans(),
    strided=st.booleans(),
    dtype=dtypes,
    threads=st.integers(1, 3),
)
def test_products(seed, rows, inputs, outputs, biased, strided, dtype, threads) -> None:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs + 5 * strided, generator=generator).to(dtype)[:, :inputs]
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if biased else None
    out = CPP["packed_linear"](x, CPP["pack_weight"](weight), outputs, bias)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert out.dtype == dtype and out.shape == (rows, outputs)
    # Partial sums reach about 60, where float32 rounds at 4e-6, and there are 300 of them.
    rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 4e-7
    torch.testing.assert_close(out.double(), exact, rtol=0.51 * rounding, atol=6e-5)


@settings(max_examples=40, deadline=None)
@given(seed=seeds, rows=st.integers(2, 130), dtype=dtypes, threads=st.integers(1, 3))
def test_a_row_does_not_depend_on_the_others(seed: int, rows: int, dtype: torch.dtype, threads: int) -> None:
    """What a verify pass computes for a node is bit by bit what plain decoding computes for the same token."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 576, generator=generator).to(dtype)
    packed = CPP["pack_weight"](torch.randn(200, 576, generator=generator).to(dtype))
    torch.set_num_threads(threads)
    together = CPP["packed_linear"](x, packed, 200, None)
    torch.set_num_threads(1)
    row = int(torch.randint(0, rows, (), generator=generator))
    assert torch.equal(together[row], CPP["packed_linear"](x[row : row + 1], packed, 200, None)[0])


def test_long_sums_stay_precise() -> None:
    """Against torch's own error on the same product."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 8192, generator=generator), torch.randn(512, 8192, generator=generator)
    exact = x.double() @ weight.double().T
    ours = (CPP["packed_linear"](x, CPP["pack_weight"](weight), 512, None) - exact).abs().max()
    assert ours < 4 * (torch.nn.functional.linear(x, weight) - exact).abs().max()


def test_not_a_number_stays_in_its_row() -> None:
    x = torch.ones(3, 64)
    x[1, 5] = torch.nan
    out = CPP["packed_linear"](x, CPP["pack_weight"](torch.ones(70, 64)), 70, None)
    assert out[1].isnan().all() and out[[0, 2]].eq(64).all()


def test_what_does_not_fit_is_refused() -> None:
    packed = CPP["pack_weight"](torch.ones(70, 64))
    with pytest.raises(ValueError, match="another shape"):
        CPP["packed_linear"](torch.ones(1, 32), packed, 70, None)
    with pytest.raises(ValueError, match="another shape"):
        CPP["packed_linear"](torch.ones(1, 64), packed, 170, None)
    with pytest.raises(ValueError, match="bias"):
        CPP["packed_linear"](torch.ones(1, 64), packed, 70, torch.ones(64))
    with pytest.raises(TypeError):
        CPP["pack_weight"](torch.ones(70, 64).half())
