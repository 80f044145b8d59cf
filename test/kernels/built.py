"""The C++ kernels under test, or a skip."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_kernel_ext import cpu


def ops_or_skip(name: str) -> Any:
    """The operators of one source file. Without a compiler its tests would compare the reference with itself."""
    try:
        return cpu.load_ops(name)
    except cpu.BuildError as error:
        pytest.skip(str(error), allow_module_level=True)
