"""The C++ kernel of the tree-size head against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from built import ops_or_skip
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from sgl_kernel_ext.dispatch import KERNELS, get_kernel
from sgl_kernel_ext.reference import head as reference


@pytest.fixture(scope="module", autouse=True)
def needs_the_kernel() -> None:
    ops_or_skip("head")


def random_inputs(seed: int, requests: int, depth: int, topk: int, rank: int, scale: float) -> tuple[object, ...]:
    generator = torch.Generator().manual_seed(seed)
    vocabulary = 50

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    log_probs = -draw(requests, depth, topk).square()
    log_probs = log_probs.masked_fill(torch.rand(log_probs.shape, generator=generator) < 0.1, -torch.inf)
    return (
        torch.randint(0, vocabulary, (requests, depth, topk), generator=generator),
        log_probs,
        torch.randint(0, vocabulary, (requests,), generator=generator),
        draw(requests, depth, 1 + rank) * scale,
        draw(vocabulary),
        draw(),
        draw(vocabulary, rank),
        draw(vocabulary, rank),
    )


# Around the 16 lanes of a vector, in candidates and in ranks.
@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    requests=st.integers(1, 9),
    depth=st.integers(0, 4),
    topk=st.sampled_from([1, 3, 8, 16, 17, 24]),
    rank=st.sampled_from([1, 5, 16, 32, 40]),
    scale=st.sampled_from([0.5, 30.0]),
    exclusive=st.booleans(),
    broken=st.sampled_from([None, math.nan, math.inf]),
)
def test_path_edges(seed, requests, depth, topk, rank, scale, exclusive, broken) -> None:
    inputs = random_inputs(seed, requests, depth, topk, rank, scale)
    if broken is not None and depth:
        inputs[3][0, depth - 1, 0] = broken
    expected = reference.path_edges(*inputs, exclusive)
    actual = KERNELS["path_edges"]["cpp"](*inputs, exclusive)
    assert actual.shape == expected.shape and actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=2e-4 if scale > 1 else 2e-5, rtol=1e-4)


def test_an_unknown_token_raises() -> None:
    inputs = list(random_inputs(0, 1, 2, 3, 4, 1.0))
    inputs[2] = torch.tensor([50])
    with pytest.raises(IndexError):
        KERNELS["path_edges"]["cpp"](*inputs, True)


def test_fake_tensors_and_the_table() -> None:
    inputs = random_inputs(0, 2, 3, 4, 5, 1.0)
    with FakeTensorMode() as mode:
        fake = get_kernel("path_edges", "cpu")(*(mode.from_tensor(t) for t in inputs), True)
    assert fake.shape == (2, 3, 4, 4)
