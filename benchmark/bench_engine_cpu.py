"""How much of a decode step on the CPU platform is not matrix products, and where it goes.

    python benchmark/bench_engine_cpu.py --out results/engine-cpu

Three engines serve the demo's target without speculation, each in a process of its own: `torch_native` (SGLang as it
is), `general` (SGLang's layers on our attention backend) and `platform` (what the CPU platform installs: layer kernels,
packed weights, the decoder loop). For every number of requests a process times whole decode steps (batch
preparation, forward, sampling) and, in turn with them, the model's matrix products alone at as many rows: those that
this engine calls, and torch's. A profile by torch.profiler says where the rest of a step goes. OUT.json holds
everything, OUT.md the tables. The tokens of all engines are compared: in float32 they must be the same.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from load_machine import OtherLoad

from sglang_d3tree.demo.pair import prepare_pair
from sglang_d3tree.machine import processor_name

ENGINES = ("torch_native", "general", "platform")

# Beginning of an operator's name -> the part of a step that it belongs to; the first that fits counts.
PARTS = {
    "sgl_kernel_ext_linear::": "matrix products",
    "aten::addmm": "matrix products",
    "aten::mm": "matrix products",
    "aten::linear": "matrix products",
    "aten::mkldnn": "matrix products",
    "mkldnn": "matrix products",
    "sgl_kernel_ext_attention::": "attention",
    "aten::_scaled_dot_product": "attention",
    "sgl_kernel_ext_layers::rotate": "rotary embedding and KV write",
    "sgl_kernel_ext_layers::store_kv": "rotary embedding and KV write",
    "sgl_kernel_ext_layers::": "norms and activation",
}
OTHER_OPERATORS = "other torch operators"
PYTHON = "Python and SGLang's batch handling"


# ---------------------------------------------------------------- one engine, in its own process


class Engine:
    """The target as one of ENGINES serves it, without a server around it."""

    def __init__(self, name: str, model: str, dtype: str, capacity: int) -> None:
        if name != "platform":
            _take_back_the_platforms_changes()
        # The order of a server's start: model runners are imported before plugins hook into them.
        import sglang.srt.managers.scheduler  # noqa: F401
        from sglang.benchmark import one_batch
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import PortArgs, ServerArgs

        load_plugins()
        arguments = ServerArgs(
            model_path=model,
            dtype=dtype,
            attention_backend="torch_native" if name == "torch_native" else None,
            max_total_tokens=capacity,
            log_level="error",
        )
        arguments.resolve_once()
        one_batch._set_envs_and_config(arguments)
        ranks = one_batch.SpawnRanks(
            world_rank=one_batch.spawn_world_rank(arguments, tp_rank=0, pp_rank=0), gpu_id=0
        )
        one_batch.publish(arguments, role="scheduler", ranks=ranks)
        one_batch._init_process_global_configs()
        self._bench = one_batch
        self._runner, _ = one_batch.load_model(arguments, PortArgs.init_new(arguments), 0, 0)
        self.model = self._runner.torch_runner.model

    @torch.no_grad()
    def decoding(self, requests: int, context: int) -> Callable[[], torch.Tensor]:
        """Prefill that many made-up prompts; the function returned decodes one token of each and says which."""
        self._runner.clear()
        words = self.model.lm_head.weight.shape[0]
        generator = torch.Generator().manual_seed(requests)
        # The first tokens of a vocabulary have meanings of their own.
        prompts = torch.randint(min(20, words // 2), min(10_000, words), (requests, context), generator=generator)
        made = self._bench.prepare_synthetic_inputs_for_latency_test(requests, context, prompts.tolist())
        tokens, _, batch = self._runner.extend(made)

        @torch.no_grad()
        def step() -> torch.Tensor:
            nonlocal tokens
            tokens, _ = self._runner.decode(tokens, batch)
            return tokens

        return step

    def products(self, rows: int, torchs: bool) -> Callable[[], None]:
        """All matrix products of a step at this many rows, in the model's order; torchs: by torch instead of ours."""
        decoder, head = self.model.model, self.model.lm_head
        layers = [
            linear
            for layer in decoder.layers
            for linear in (
                layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj
            )
        ]  # fmt: skip
        inputs = {
            linear.weight.shape[1]: torch.randn(rows, linear.weight.shape[1]).to(linear.weight.dtype)
            for linear in [*layers, head]
        }
        calls = [(linear, inputs[linear.weight.shape[1]], getattr(linear, "bias", None)) for linear in layers]
        calls.append((head, inputs[head.weight.shape[1]], None))

        @torch.no_grad()
        def run() -> None:
            for linear, x, bias in calls:
                if torchs:
                    torch.nn.functional.linear(x, linear.weight, bias)
                else:
                    linear.quant_method.apply(linear, x, bias)

        return run


def _take_back_the_platforms_changes() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from sglang_d3tree.platform import PortableCpuPlatform
    from sglang_d3tree.runtime import kv_pool_cpu, layers_cpu

    def nothing(*args: Any) -> None:
        return None

    PortableCpuPlatform.post_load_model = nothing  # type: ignore[method-assign]
    layers_cpu.register_layers = nothing
    pool: Any = kv_pool_cpu.CpuMHATokenToKVPool
    pool._store_kv_layer = MHATokenToKVPool._store_kv_layer


def measure(engine: Engine, requests: int, context: int, repeats: int) -> dict[str, Any]:
    """Times in milliseconds, step and products taking turns, and the first tokens decoded."""
    step = engine.decoding(requests, context)
    tokens = [step().tolist() for _ in range(4)]
    calls: dict[str, Callable[[], Any]] = {
        "step": step,
        "products": engine.products(requests, torchs=False),
        "torch_products": engine.products(requests, torchs=True),
    }
    for call in calls.values():
        call()
    times = defaultdict(list)
    for _ in range(repeats):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - began) * 1e3)
    result: dict[str, Any] = {
        name: {"median": statistics.median(values), "best": min(values)} for name, values in times.items()
    }
    return result | {"requests": requests, "tokens": tokens, "parts": profile(step, min(repeats, 20))}


def profile(step: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Milliseconds of a step by PARTS; the profiler itself makes Python slower."""
    began = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as recorded:
        for _ in range(repeats):
            step()
        wall = (time.perf_counter() - began) * 1e3 / repeats
    parts: dict[str, float] = defaultdict(float)
    for event in recorded.key_averages():
        part = next((part for start, part in PARTS.items() if event.key.startswith(start)), OTHER_OPERATORS)
        parts[part] += event.self_cpu_time_total / 1e3 / repeats
    parts[PYTHON] = max(wall - sum(parts.values()), 0.0)
    return dict(parts)


def run_engine(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    largest = max(options.requests)
    # Prompt and answer of every request, with room for the page that each begins.
    capacity = largest * (options.context + 3 * options.repeats + 64)
    engine = Engine(options.engine, options.model, options.dtype, capacity)
    load = OtherLoad()
    rows = [measure(engine, requests, options.context, options.repeats) for requests in options.requests]
    Path(options.out).write_text(json.dumps({"rows": rows, "other_load": load.share()}))


# ---------------------------------------------------------------- all of them


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Every engine in a process of its own."""
    results: dict[str, Any] = {}
    for name in options.engines:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [sys.executable, __file__, "--engine", name, "--out", file.name]
            for flag in ("model", "dtype", "context", "repeats", "threads"):
                command += [f"--{flag}", str(getattr(options, flag))]
            subprocess.run([*command, "--requests", *map(str, options.requests)], check=True)
            results[name] = json.loads(Path(file.name).read_text())
    return results


def disagreements(results: dict[str, Any]) -> list[str]:
    """Settings in which an engine decodes other tokens than the first one."""
    first, *others = results
    return [
        f"{name} at {row['requests']} requests"
        for name in others
        for row, wanted in zip(results[name]["rows"], results[first]["rows"], strict=True)
        if row["tokens"] != wanted["tokens"]
    ]


def report(record: dict[str, Any]) -> str:
    lines = [
        f"`{record['command']}`",
        "",
        f"{record['machine']}, {record['threads']} thread(s), torch {record['torch']}, sglang {record['sglang']}, "
        f"{record['dtype']}; medians of {record['repeats']} steps; others used "
        + ", ".join(f"{result['other_load']:.2f}" for result in record["engines"].values())
        + " cores meanwhile.",
        "",
        "| engine | requests | step ms | its products ms | step / products | torch's products ms | step / torch's |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in record["engines"].items():
        for row in result["rows"]:
            step, ours, torchs = (row[key]["median"] for key in ("step", "products", "torch_products"))
            lines.append(
                f"| {name} | {row['requests']} | {step:.1f} | {ours:.1f} | {step / ours:.2f} | {torchs:.1f} "
                f"| {step / torchs:.2f} |"
            )
    lines += ["", "Where a step goes (torch.profiler, which makes Python slower than it is), in ms:", ""]
    names = [*dict.fromkeys(PARTS.values()), OTHER_OPERATORS, PYTHON]
    lines += [f"| engine | requests | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for name, result in record["engines"].items():
        for row in result["rows"]:
            parts = " | ".join(f"{row['parts'].get(part, 0.0):.1f}" for part in names)
            lines.append(f"| {name} | {row['requests']} | {parts} |")
    differing = record["disagreements"]
    said = "All engines decoded the same tokens." if not differing else f"Other tokens: {', '.join(differing)}."
    return "\n".join([*lines, "", said, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="results/engine-cpu", help="OUT.json and OUT.md")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--context", type=int, default=128, help="tokens in front of the first decoded one")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--model", help="checkpoint; default: the demo's target")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        run_engine(options)
        return
    options.model = options.model or str(prepare_pair().model_path)
    results = compare(options)
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": processor_name(),
        "torch": torch.__version__,
        "sglang": version("sglang"),
        **{key: getattr(options, key) for key in ("threads", "dtype", "context", "repeats")},
        "engines": results,
        "disagreements": disagreements(results),
    }
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(record, indent=1))
    out.with_suffix(".md").write_text(report(record))
    print(report(record))
    if record["disagreements"] and options.dtype == "float32":
        raise SystemExit("In float32 the engines must decode the same tokens.")


if __name__ == "__main__":
    main()
