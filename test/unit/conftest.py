"""Unit tests state what the method does: they run on the specification, whatever faster kernels are registered.

That the others agree with it is test/kernels' business.
"""

import pytest

from sgl_kernel_ext import cpu, dispatch  # registers itself, so that it cannot do so inside a patched table


@pytest.fixture(autouse=True)
def only_the_specification(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {name: {"reference": kernels["reference"]} for name, kernels in dispatch.KERNELS.items()}
    assert set(cpu.TREE_KERNELS) <= set(table)
    monkeypatch.setattr(dispatch, "KERNELS", table)
