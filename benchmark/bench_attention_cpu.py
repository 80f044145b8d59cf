"""Attention on CPU: SGLang's torch_native backend against ours, one layer at SmolLM2-135M's shapes.

    python benchmark/bench_attention_cpu.py [--dtypes float32 bfloat16] [--repeats 30] [--reference]

Prints one line per case: milliseconds per call (the minimum over the repeats, other jobs may share the machine) and
how many times faster the C++ kernel is. torch_native cannot verify trees: there it gets the same rows as a chain,
which costs it the same. KV writes are left out, both backends share SGLang's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sgl_kernel_ext import cpu
from sgl_kernel_ext.reference import attention as reference

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
SCALING = HEAD_DIM**-0.5


@dataclass(frozen=True)
class Case:
    name: str
    requests: int
    prefix: int
    rows: int
    mode: str = "causal"


CASES = [
    *(Case(f"decode {n} x {context}", n, context - 1, 1) for n in (1, 8, 64) for context in (128, 1024)),
    *(Case(f"extend 512 behind {prefix}", 1, prefix, 512) for prefix in (0, 512)),
    *(Case(f"verify 32 x {n} at {context}", n, context, 32, "tree") for n in (1, 8) for context in (128, 1024)),
]


def random_trees(requests: int, rows: int) -> torch.Tensor:
    """[requests * rows, rows]: one random tree, repeated."""
    mask = torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        mask[row] |= mask[int(torch.randint(row, (1,)))]
    return mask.repeat(requests, 1)


def make_arguments(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of our kernel; slots lie in runs of 16 tokens scattered over the cache, as after some uptime."""
    torch.manual_seed(0)
    length = case.prefix + case.rows
    runs = -(-length // 16)
    order = torch.randperm(case.requests * runs).view(case.requests, runs, 1)
    slots = (order * 16 + torch.arange(16)).view(case.requests, -1)[:, :length].contiguous()
    return {
        "q": torch.randn(case.requests * case.rows, HEADS, HEAD_DIM).to(dtype),
        "k_cache": torch.randn(case.requests * runs * 16, KV_HEADS, HEAD_DIM).to(dtype),
        "v_cache": torch.randn(case.requests * runs * 16, KV_HEADS, HEAD_DIM).to(dtype),
        "slot_table": slots.int(),
        "req_rows": torch.arange(case.requests),
        "prefix_lens": torch.full((case.requests,), case.prefix),
        "row_offsets": torch.arange(case.requests + 1) * case.rows,
        "scaling": SCALING,
        "mode": case.mode,
        "ancestor_mask": random_trees(case.requests, case.rows) if case.mode == "tree" else None,
    }


def make_stock(case: Case, arguments: dict[str, Any]) -> Callable[[], torch.Tensor]:
    runner: Any = SimpleNamespace(device="cpu", req_to_token_pool=None, token_to_kv_pool=None)
    backend = TorchNativeAttnBackend(runner)
    q = arguments["q"]
    output = torch.empty_like(q)
    shared = (q, output, arguments["k_cache"], arguments["v_cache"], arguments["slot_table"], arguments["req_rows"])
    rows = torch.full((case.requests,), case.rows)
    lengths = arguments["prefix_lens"] + rows
    if case.rows == 1:
        return lambda: backend._run_sdpa_forward_decode(*shared, lengths, scaling=SCALING, enable_gqa=True)
    prefixes = arguments["prefix_lens"]
    return lambda: backend._run_sdpa_forward_extend(
        *shared, lengths, prefixes, rows, scaling=SCALING, enable_gqa=True, causal=True
    )


def best_ms(call: Callable[[], torch.Tensor], repeats: int) -> float:
    """Fastest of `repeats` timings, each over enough calls to last a few milliseconds."""
    start = time.perf_counter()
    call()
    inner = max(1, int(0.003 / (time.perf_counter() - start + 1e-9)))
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(inner):
            call()
        best = min(best, (time.perf_counter() - start) / inner)
    return best * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--reference", action="store_true", help="time the torch reference as well")
    options = parser.parse_args()
    cpu.load_ops("attention")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; ms per call, minimum of {options.repeats}")
    print(
        f"{'case':<24}{'type':<10}{'torch_native':>13}{'d3tree_cpu':>12}{'faster':>9}"
        + "  reference" * options.reference
    )
    for name in options.dtypes:
        for case in CASES:
            arguments = make_arguments(case, getattr(torch, name))
            stock = best_ms(make_stock(case, arguments), options.repeats)
            ours = best_ms(partial(cpu.paged_attention, **arguments), options.repeats)
            line = f"{case.name:<24}{name:<10}{stock:>13.3f}{ours:>12.3f}{stock / ours:>8.1f}x"
            if options.reference:
                line += f"{best_ms(partial(reference.paged_attention, **arguments), options.repeats):>11.3f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
