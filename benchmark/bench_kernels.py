"""Every kernel of the dispatch table against its bound: what memory or arithmetic of this machine would need.

    python benchmark/bench_kernels.py [--device cpu|cuda] [--requests 64] [--vocabulary 49152] ...

Needs torch, and Triton on a GPU; neither SGLang nor an installation. Per kernel and implementation it prints
milliseconds per call (the minimum over the repeats, other jobs may share the machine; on a GPU a captured graph is
timed, without the launches from Python), the bytes it must move (inputs and outputs, once each), the bound (those bytes
at the measured bandwidth, or the floating-point operations at the measured rate, whichever is longer) and the ratio
of the two. Small kernels are far above a bound of microseconds: there the milliseconds are what counts. Before it is
timed, the preferred implementation must agree with the reference; otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sgl-kernel-ext"))  # so that nothing need be installed

from sgl_kernel_ext import dispatch
from sgl_kernel_ext.reference import kv, tree

LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 30, 9, 3, 64, 1024  # SmolLM2-135M


@dataclass(frozen=True)
class Case:
    """A call of the kernel `name`; `bytes` and `flops` are what it cannot avoid, bytes 0 meaning inputs and outputs."""

    name: str
    arguments: tuple[Any, ...]
    label: str = ""
    bytes: int = 0
    flops: int = 0


def best_seconds(call: Callable[[], Any], repeats: int, device: str) -> float:
    """Fastest of `repeats` timings, each over enough calls to last a few milliseconds."""
    call()
    if device == "cuda":
        call = captured(call)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    inner = max(1, int(0.003 / (time.perf_counter() - start + 1e-9)))
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(inner):
            call()
        synchronize()
        best = min(best, (time.perf_counter() - start) / inner)
    return best


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a CUDA graph, so that Python and the launches take no part in the time."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors(item)] if isinstance(value, (tuple, list)) else []


def num_bytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors(value))


def machine_limits(device: str, repeats: int) -> tuple[float, float]:
    """Bytes per second of the better of reading and copying 256 MiB, and float32 operations per second of matmul."""
    source = torch.ones(64 << 20, device=device)
    target = torch.empty_like(source)
    read = num_bytes(source) / best_seconds(source.sum, repeats, device)
    copy = 2 * num_bytes(source) / best_seconds(lambda: target.copy_(source), repeats, device)
    side = 1024 if device == "cpu" else 8192
    left = torch.ones(side, side, device=device)
    return max(read, copy), 2 * side**3 / best_seconds(lambda: left @ left, repeats, device)


def tree_cases(options: argparse.Namespace) -> list[Case]:
    """One round of `requests` requests with whole trees, the reference making each next kernel's input."""
    device, dtype = options.device, getattr(torch, options.dtype)
    requests, horizon, rows = options.requests, options.horizon, options.rows
    logits = (torch.randn(requests, horizon, options.vocabulary, device=device) * 3).to(dtype)
    horizons = torch.full((requests,), horizon, device=device)
    candidates = (logits, options.topk, horizons)
    token_ids, log_probs = tree.draft_candidates(*candidates)
    build = (token_ids, log_probs.unsqueeze(2), torch.arange(requests, device=device), rows)
    tokens, parents, depths, _, log_scores, valid = tree.build_tree(*build)
    product = ((log_scores - log_scores.gather(1, parents)).exp() * valid, parents, horizon)
    capacity = requests * rows // 2
    fill = (tree.path_product(*product), depths, valid, valid, capacity)
    layout = (tokens, parents, depths, tree.fill_rows(*fill), capacity, horizon)
    row_tokens, _, _, _, row_parents, *_ = tree.layout_rows(*layout)
    children = (row_tokens, row_parents, row_tokens.roll(-1))

    caches = list(torch.zeros(2 * LAYERS, requests * rows, KV_HEADS, HEAD_DIM, dtype=dtype, device=device))
    first = torch.arange(requests, device=device)[:, None] * rows
    step = torch.arange(horizon + 1, device=device)
    moves = (caches, first + step, first + step * (rows // (horizon + 1)))
    moved = 2 * requests * horizon * 2 * LAYERS * KV_HEADS * HEAD_DIM * dtype.itemsize
    return [
        Case("draft_candidates", candidates),
        Case("build_tree", build),
        Case("path_product", product),
        Case("fill_rows", fill),
        Case("layout_rows", layout),
        Case("matching_child", children),
        Case("compact_kv", moves, bytes=moved),
    ]


def attention_cases(options: argparse.Namespace) -> list[Case]:
    """One layer: decode, and verify of whole trees; on CPU, where the table has a kernel of its own."""
    requests, dtype = options.requests, getattr(torch, options.dtype)
    cases = []
    for label, rows in (("decode", 1), ("verify", options.rows)):
        slots = torch.randperm(requests * (CONTEXT + rows)).view(requests, -1).int()
        cache = torch.randn(2, slots.numel(), KV_HEADS, HEAD_DIM).to(dtype)
        q = torch.randn(requests * rows, HEADS, HEAD_DIM).to(dtype)
        mask = torch.ones(rows, rows).tril().bool().repeat(requests, 1)
        arguments = (
            q, cache[0], cache[1], slots, torch.arange(requests), torch.full((requests,), CONTEXT),
            torch.arange(requests + 1) * rows, HEAD_DIM**-0.5, "tree", mask,
        )  # fmt: skip
        flops = 4 * q.numel() * (CONTEXT + rows)
        cases.append(Case("paged_attention", arguments, label, num_bytes(cache) + 2 * num_bytes(q), flops))
    return cases


def agrees(case: Case, ours: Any, theirs: Any) -> bool:
    """Integers exactly, floats within rounding."""
    tolerance = 2e-2 if case.name == "paged_attention" else 5e-6
    return all(
        torch.allclose(a, b, atol=tolerance, rtol=tolerance) if a.is_floating_point() else torch.equal(a, b)
        for a, b in zip(tensors(ours), tensors(theirs), strict=True)
    )


def run_and_check(case: Case, kernel: Callable[..., Any]) -> tuple[Any, bool]:
    if case.name == "compact_kv":  # in place: give every row a value of its own and compare what came of it
        for cache in case.arguments[0]:
            cache.copy_(torch.arange(cache.shape[0], device=cache.device).view(-1, 1, 1).expand_as(cache))
        expected = [cache.clone() for cache in case.arguments[0]]
        kv.compact_kv(expected, *case.arguments[1:])
        kernel(*case.arguments)
        return (), agrees(case, case.arguments[0], expected)
    result = kernel(*case.arguments)
    return result, agrees(case, result, dispatch.KERNELS[case.name]["reference"](*case.arguments))


def report(case: Case, options: argparse.Namespace, limits: tuple[float, float]) -> bool:
    """Print the case's lines; False where the preferred implementation disagrees with the reference."""
    preferred = dispatch.get_kernel(case.name, options.device)
    kernels = {name: fn for name, fn in dispatch.KERNELS[case.name].items() if fn is preferred or name == "reference"}
    result, ok = run_and_check(case, preferred)
    moved = case.bytes or num_bytes(case.arguments) + num_bytes(result)
    bound = max(moved / limits[0], case.flops / limits[1])
    for name, kernel in kernels.items():
        if case.name == "paged_attention" and name == "reference":
            continue  # a loop over requests, there to be read
        seconds = best_seconds(lambda kernel=kernel: kernel(*case.arguments), options.repeats, options.device)
        print(
            f"{(case.name + ' ' + case.label).strip():<24}{name:<11}{seconds * 1e3:>10.3f}{moved / 1e6:>10.2f}"
            f"{bound * 1e3:>10.4f}{seconds / bound:>9.1f}x  {'' if ok else 'DIFFERS FROM THE REFERENCE'}",
            flush=True,
        )
    return ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--horizon", type=int, default=7)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--topk", type=int, default=16)
    parser.add_argument("--rows", type=int, default=32, help="per request, the anchor included")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.device == "cpu":
        from sgl_kernel_ext import cpu

        cpu.build_all()
    limits = machine_limits(options.device, options.repeats)
    name = torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"torch {torch.__version__}, {name}: {limits[0] / 1e9:.1f} GB/s, {limits[1] / 1e9:.0f} float32 GFLOP/s")
    print(f"{'kernel':<24}{'by':<11}{'ms':>10}{'MB':>10}{'bound ms':>10}{'ms/bound':>10}")
    cases = tree_cases(options) + (attention_cases(options) if options.device == "cpu" else [])
    return 0 if all([report(case, options, limits) for case in cases]) else 1


if __name__ == "__main__":
    sys.exit(main())
