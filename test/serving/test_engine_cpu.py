"""The CPU platform's decoder loop and packed weights in a loaded model: the same numbers as SGLang's own layers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import models

pytestmark = pytest.mark.timeout(900)

# One process: SGLang keeps its arguments and groups in globals, and the other tests need theirs.
SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from bench_engine_cpu import Engine
from sglang_d3tree.runtime import decoder_cpu
from sglang_d3tree.runtime.linear_cpu import PackedHeadMethod, PackedLinearMethod

engine = Engine("platform", sys.argv[2], sys.argv[3], 4096)
stack = engine.model.model
decoder = stack.forward.args[0]
runs = {"loop": [], "stock": []}

calls = {"stock": decoder.stock_forward, "loop": lambda *args, **kw: decoder_cpu.target_forward(decoder, *args, **kw)}

def both(*args, **kwargs):
    for name, call in calls.items():
        runs[name].append(call(*args, **kwargs))
    return runs["loop"][-1]

stack.forward = both
step = engine.decoding(3, 20)
tokens = [step().tolist() for _ in range(4)]
worst = max((a - b).abs().max().item() for a, b in zip(runs["loop"], runs["stock"]))
scale = max(a.abs().max().item() for a in runs["stock"])

stack.layers_to_capture = [0, 2, 3]
seen = {}
def capturing(*args, **kwargs):
    for name, call in calls.items():
        hidden, captured = call(*args, **kwargs)
        seen[name] = [hidden, *captured]
    return hidden
stack.forward = capturing
step()
captured = max((a - b).abs().max().item() for a, b in zip(seen["loop"], seen["stock"], strict=True))

linear = stack.layers[0].mlp.down_proj
x = torch.randn(2, linear.weight.shape[1]).to(linear.weight.dtype)
with torch.no_grad():
    before = linear.quant_method.apply(linear, x, None)
    name = next(name for name, module in engine.model.named_modules() if module is linear) + ".weight"
    engine.model.load_weights([(name, linear.weight.data * 2)])
    after = linear.quant_method.apply(linear, x, None)
    looped = decoder.layers[0].down(x)

print("\\n" + json.dumps({
    "positions": decoder.rotary.axis_map is not None,
    "packed": [type(m.quant_method) in (PackedLinearMethod, PackedHeadMethod) for m in (linear, engine.model.lm_head)],
    "worst": worst, "scale": scale, "captured": captured, "layers": len(seen["loop"]),
    "doubled": torch.equal(after, before * 2) and torch.equal(looped, after), "tokens": tokens,
}))
"""


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def told(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """The type, and what a process says that runs every forward by both."""
    benchmark = Path(__file__).parents[2] / "benchmark"
    command = [sys.executable, "-c", SCRIPT, str(benchmark), str(models.letters_target()), request.param]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert answer.returncode == 0, answer.stderr[-4000:]
    return request.param, json.loads(answer.stdout.splitlines()[-1])


def test_loop_computes_what_sglangs_layers_compute(told: tuple[str, dict[str, Any]]) -> None:
    """Prefill and decode of a VLM target; what differs is rounding: the loop norms the sum before rounding it."""
    dtype, found = told
    allowed = found["scale"] * (2e-5 if dtype == "float32" else 5e-2)
    assert found["positions"], "the target was to have a position per axis"
    assert found["worst"] <= allowed
    assert found["captured"] <= max(allowed, 5e-5)


def test_captured_hidden_states_come_from_the_layers_asked_for(told: tuple[str, dict[str, Any]]) -> None:
    assert told[1]["layers"] == 1 + 3


def test_linear_layers_and_head_are_packed(told: tuple[str, dict[str, Any]]) -> None:
    assert told[1]["packed"] == [True, True]


def test_new_weights_reach_the_packed_copies(told: tuple[str, dict[str, Any]]) -> None:
    assert told[1]["doubled"]
