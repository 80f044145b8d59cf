"""One table of kernels: the same function by name, in one or more implementations.

    fill_rows = get_kernel("fill_rows", survival.device.type)

Every kernel has a `reference` in plain torch, which runs on any device and specifies the result. Faster ones are
added by `register`; nobody else has to know about them. Those of this package join when a device first asks for a
kernel, so that importing the table needs neither a compiler nor Triton.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from sgl_kernel_ext.reference import head, kv, layers, linear, tree

Kernel = Callable[..., Any]

KERNELS: dict[str, dict[str, Kernel]] = {
    "draft_candidates": {"reference": tree.draft_candidates},
    "build_tree": {"reference": tree.build_tree},
    "path_edges": {"reference": head.path_edges},
    "path_product": {"reference": tree.path_product},
    "fill_rows": {"reference": tree.fill_rows},
    "layout_rows": {"reference": tree.layout_rows},
    "matching_child": {"reference": tree.matching_child},
    "compact_kv": {"reference": kv.compact_kv},
    "store_kv": {"reference": kv.store_kv},
    "pack_weight": {"reference": linear.pack_weight},
    "packed_linear": {"reference": linear.packed_linear},
    "rms_norm": {"reference": layers.rms_norm},
    "add_rms_norm": {"reference": layers.add_rms_norm},
    "silu_and_mul": {"reference": layers.silu_and_mul},
    "rotate": {"reference": layers.rotate},
    "rotate_and_store": {"reference": layers.rotate_and_store},
}

PREFERENCE: dict[str, tuple[str, ...]] = {"cuda": ("triton", "reference"), "cpu": ("cpp", "reference")}


PROVIDERS: dict[str, str] = {"cuda": "sgl_kernel_ext.triton_kernels", "cpu": "sgl_kernel_ext.cpu"}


def register(name: str, impl: str, fn: Kernel) -> None:
    """Add an implementation (`reference`, `cpp` or `triton`) of the kernel `name`; the last one registered counts.

    Raises ValueError for an implementation that no device would choose.
    """
    known = {choice for order in PREFERENCE.values() for choice in order}
    if impl not in known:
        raise ValueError(f"unknown implementation {impl!r} of {name}: expected one of {sorted(known)}")
    KERNELS.setdefault(name, {})[impl] = fn


def get_kernel(name: str, device_type: str) -> Kernel:
    """The preferred registered implementation of `name` for "cpu", "cuda" or another torch device type.

    Raises KeyError if `name` is unknown or has no implementation that runs on this device.
    """
    _import_provider(device_type)
    implementations = KERNELS.get(name, {})
    for impl in PREFERENCE.get(device_type, ("reference",)):
        if impl in implementations:
            return implementations[impl]
    raise KeyError(f"no kernel {name!r} for {device_type}; registered: {sorted(implementations) or 'none'}")


@functools.cache
def _import_provider(device_type: str) -> None:
    """Import the module that registers this device's kernels; Triton may be missing, then the reference serves."""
    try:
        importlib.import_module(PROVIDERS.get(device_type, __name__))
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
