"""C++ kernels for CPU: built on first use, kept per version, replaced by the reference where nothing compiles.

Importing this module puts the CPU kernels into the dispatch table; it does not build anything yet.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sgl_kernel_ext.dispatch import register
from sgl_kernel_ext.reference import attention as reference
from sgl_kernel_ext.reference import head, kv, layers, linear, tree
from sgl_kernel_ext.reference.attention import ATTENTION_MODES, AttentionMode, check_attention_inputs

SOURCES = Path(__file__).parent / "csrc"
CXX_FLAGS = ["-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast"]


class BuildError(RuntimeError):
    """The C++ kernels could not be built or loaded; the message carries the compiler's words."""


@functools.cache
def load_ops(name: str) -> object:
    """Build (once per machine and version) and load `csrc/<name>.cpp`.

    The library is kept under TORCH_EXTENSIONS_DIR (default: torch_extensions in the user's cache directory), in a
    folder named by everything that its machine code depends on. Any number of processes may ask at once: one
    builds, the others wait.

    Returns:
        The operator namespace `torch.ops.sgl_kernel_ext_<name>`.

    Raises:
        BuildError: no compiler, a compile error, or a library that does not load.
    """
    try:
        library = _library_path(name)
        library.parent.mkdir(parents=True, exist_ok=True)
        with _only_process(library.with_suffix(".lock")):
            if not library.exists():
                _build(name, library)
        torch.ops.load_library(str(library))
    except (RuntimeError, OSError, ImportError) as error:
        raise BuildError(f"cannot build {name}.cpp: {error}") from error
    return getattr(torch.ops, f"sgl_kernel_ext_{name}")


def _library_path(name: str) -> Path:
    parts = [torch.__version__, sys.version, " ".join(CXX_FLAGS), os.environ.get("CXX", ""), _cpu_features()]
    sources = [SOURCES / f"{name}.cpp", *sorted(SOURCES.glob("*.h"))]
    identity = hashlib.sha256("\n".join(parts).encode() + b"".join(s.read_bytes() for s in sources)).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions")
    return root / f"sgl_kernel_ext_{name}_{identity[:16]}" / f"{name}.so"


def sources_digest() -> str:
    """What tells one state of these kernels from another: whoever keeps times measured with them keeps this too."""
    sources = sorted(source for source in SOURCES.iterdir() if source.suffix in (".cpp", ".h"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:8]


def _cpu_features() -> str:
    """What -march=native depends on: home directories are shared between machines, instruction sets are not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


@contextmanager
def _only_process(lock: Path) -> Iterator[None]:
    """Hold an operating-system lock, which a killed process gives back, unlike a lock file that merely exists."""
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(name: str, library: Path) -> None:
    # Importing the build tools costs a second and logs a line about CUDA: only for those who build.
    from torch.utils import cpp_extension

    with tempfile.TemporaryDirectory(dir=library.parent) as folder, _ninja_on_path():
        cpp_extension.load(
            name=f"sgl_kernel_ext_{name}",
            sources=[str(SOURCES / f"{name}.cpp")],
            extra_cflags=CXX_FLAGS,
            extra_ldflags=["-fopenmp"],
            build_directory=folder,
            with_cuda=False,
            is_python_module=False,
        )
        # The name appears only once the file is whole. Loading the renamed file again is harmless: it is the same
        # inode, which the dynamic linker recognises.
        os.replace(Path(folder) / f"sgl_kernel_ext_{name}.so", library)


@contextmanager
def _ninja_on_path() -> Iterator[None]:
    """Make an installed `ninja` package visible even when its environment is not activated."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([before, str(Path(sys.executable).parent)])
    try:
        yield
    finally:
        os.environ["PATH"] = before


def build_all() -> bool:
    """Build and load every C++ kernel: what a server calls while it starts, so that no request waits for a compiler.

    Returns:
        Whether all of them run in C++; otherwise the warning has been given and the reference answers.
    """
    return all([ops() is not None for ops in (attention_ops, tree_ops, head_ops, layer_ops, linear_ops)])


@functools.cache
def attention_ops() -> object | None:
    """The operators of attention.cpp, or None (after the warning) when they cannot be built."""
    return _ops_or_warning("attention")


@functools.cache
def tree_ops() -> object | None:
    """The operators of tree.cpp, or None (after the warning) when they cannot be built."""
    return _ops_or_warning("tree")


@functools.cache
def head_ops() -> object | None:
    """The operators of head.cpp, or None (after the warning) when they cannot be built."""
    return _ops_or_warning("head")


@functools.cache
def layer_ops() -> object | None:
    """The operators of layers.cpp, or None (after the warning) when they cannot be built."""
    return _ops_or_warning("layers")


@functools.cache
def linear_ops() -> object | None:
    """The operators of linear.cpp, or None (after the warning) when they cannot be built."""
    return _ops_or_warning("linear")


def _ops_or_warning(name: str) -> object | None:
    try:
        return load_ops(name)
    except BuildError as error:
        _warn_once(str(error))
        return None


_warned = False


def _warn_once(reason: str) -> None:
    # What keeps one kernel from being built mostly keeps all of them from it, and one warning is read.
    global _warned
    if not _warned:
        warnings.warn(
            f"CPU kernels run on their slow torch reference because C++ is unavailable: {reason}",
            RuntimeWarning,
            stacklevel=5,
        )
    _warned = True


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_table: torch.Tensor,
    req_rows: torch.Tensor,
    prefix_lens: torch.Tensor,
    row_offsets: torch.Tensor,
    scaling: float,
    mode: AttentionMode,
    ancestor_mask: torch.Tensor | None = None,
    logit_cap: float = 0.0,
    sliding_window: int = -1,
) -> torch.Tensor:
    """Attention of ragged query rows over a paged KV cache, in C++.

    Arguments, result and errors are those of `sgl_kernel_ext.reference.attention.paged_attention`; float32, bfloat16
    and float16 are accepted, also a cache of another type than q. Work is spread over `torch.get_num_threads()`
    threads. The first call in a fresh environment compiles for about half a minute.

    Raises:
        IndexError: slot_table names a slot or row that does not exist.

    Example:
        >>> import torch
        >>> from sgl_kernel_ext.cpu import paged_attention
        >>> cache = torch.randn(64, 2, 16)                   # 64 slots, two KV heads
        >>> table = torch.arange(64, dtype=torch.int32).view(1, 64)
        >>> q = torch.randn(3, 4, 16)                        # three tree rows behind a prefix of ten tokens
        >>> tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
        >>> request, prefix, offsets = torch.tensor([0]), torch.tensor([10]), torch.tensor([0, 3])
        >>> paged_attention(q, cache, cache, table, request, prefix, offsets, 0.25, "tree", tree).shape
        torch.Size([3, 4, 16])
    """
    ops = attention_ops()
    if ops is None:
        return reference.paged_attention(
            q, k_cache, v_cache, slot_table, req_rows, prefix_lens, row_offsets, scaling, mode, ancestor_mask,
            logit_cap, sliding_window,
        )  # fmt: skip
    check_attention_inputs(q, k_cache, v_cache, mode, ancestor_mask)
    return ops.paged_attention(  # type: ignore[attr-defined]
        q, k_cache, v_cache, slot_table, req_rows, prefix_lens, row_offsets, scaling, ATTENTION_MODES.index(mode),
        ancestor_mask, logit_cap, sliding_window,
    )  # fmt: skip


def _kernel(specification: Callable[..., Any], operators: Callable[[], object | None]) -> Callable[..., Any]:
    @functools.cache
    def overload() -> Callable[..., Any] | None:
        # Looking for the right overload at every call would cost as much as a small kernel takes.
        ops = operators()
        return None if ops is None else getattr(ops, specification.__name__).default

    @functools.wraps(specification)
    def kernel(*args: Any) -> Any:
        compiled = overload()
        # The C++ operators have no derivative; a trainer that wants one gets the reference.
        if compiled is None or (torch.is_grad_enabled() and any(getattr(arg, "requires_grad", False) for arg in args)):
            return specification(*args)
        return compiled(*args)

    return kernel


TREE_KERNELS = ("draft_candidates", "build_tree", "path_product", "fill_rows", "layout_rows", "matching_child")
LAYER_KERNELS = ("rms_norm", "add_rms_norm", "silu_and_mul", "rotate", "rotate_and_store")
KV_KERNELS = ("compact_kv", "store_kv")
LINEAR_KERNELS = ("pack_weight", "packed_linear")

register("paged_attention", "reference", reference.paged_attention)
register("paged_attention", "cpp", paged_attention)
for _name in TREE_KERNELS:
    register(_name, "cpp", _kernel(getattr(tree, _name), tree_ops))
for _name in LAYER_KERNELS:
    register(_name, "cpp", _kernel(getattr(layers, _name), layer_ops))
for _name in KV_KERNELS:
    register(_name, "cpp", _kernel(getattr(kv, _name), layer_ops))
for _name in LINEAR_KERNELS:
    register(_name, "cpp", _kernel(getattr(linear, _name), linear_ops))
register("path_edges", "cpp", _kernel(head.path_edges, head_ops))
