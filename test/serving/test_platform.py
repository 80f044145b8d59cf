"""The CPU platform fills in what the user left open, never what was given, and steps aside for anything better."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support import models
from support.exact import greedy_ids, tokenizer_of
from support.resolve import resolve_all
from support.servers import LAUNCH, Server

from sglang_d3tree import platform

pytestmark = pytest.mark.timeout(600)


# ---------------------------------------------------------------- when it is active


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with no accelerator, no other platform plugin and no opt-in to SGLang's CPU engine."""
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    for name in ("cuda", "xpu", "mps"):
        monkeypatch.setattr(getattr(torch, name), "is_available", lambda: False)
    for name in ("npu", "musa"):
        monkeypatch.delattr(torch, name, raising=False)
    monkeypatch.setattr(platform, "entry_points", lambda group: [])
    return monkeypatch


class OtherPlugin:
    """An entry point of another package."""

    name = "other"

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def load(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return lambda: self.answer


def test_active_on_a_bare_machine(bare_machine: pytest.MonkeyPatch) -> None:
    assert platform.activate() == "sglang_d3tree.platform:PortableCpuPlatform"


def test_steps_aside_for_sglangs_cpu_engine(bare_machine: pytest.MonkeyPatch) -> None:
    bare_machine.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert platform.activate() is None


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_steps_aside_for_an_accelerator(kind: str, bare_machine: pytest.MonkeyPatch) -> None:
    """ROCm answers as cuda."""
    bare_machine.setattr(getattr(torch, kind), "is_available", lambda: True)
    assert platform.activate() is None


@pytest.mark.parametrize("kind", ["npu", "musa"])
def test_steps_aside_for_a_build_of_torch_that_brings_its_own_device(
    kind: str, bare_machine: pytest.MonkeyPatch
) -> None:
    bare_machine.setattr(torch, kind, object(), raising=False)
    assert platform.activate() is None


def test_steps_aside_for_another_active_platform(bare_machine: pytest.MonkeyPatch) -> None:
    bare_machine.setattr(platform, "entry_points", lambda group: [OtherPlugin("other:Platform")])
    assert platform.activate() is None


@pytest.mark.parametrize("answer", [None, ImportError("its driver is missing")], ids=["inactive", "broken"])
def test_stays_when_the_other_platform_is_not_active(answer: Any, bare_machine: pytest.MonkeyPatch) -> None:
    bare_machine.setattr(platform, "entry_points", lambda group: [OtherPlugin(answer)])
    assert platform.activate() is not None


# ---------------------------------------------------------------- values

POLICY = "--speculative-d3tree-policy"


@pytest.fixture(scope="module")
def resolved() -> dict[str, dict[str, Any]]:
    """Command lines of one model, resolved in one process."""
    target, drafter = str(models.letters_target()), str(models.letters_drafter())
    speculative = ["--speculative-algorithm", "d3tree", "--speculative-draft-model-path", drafter]
    given = [
        *("--max-total-tokens", "5000", "--dtype", "float16", "--attention-backend", "torch_native"),
        *("--max-running-requests", "3", "--sampling-backend", "pytorch"),
    ]
    cases: dict[str, tuple[list[str], dict[str, str]]] = {
        "plain": ([], {}),
        "plain, given": (given, {}),
        "d3tree": (speculative, {}),
        "lower case": (["--speculative-algorithm", "D3Tree", *speculative[2:]], {}),
        "few rows": ([*speculative, "--speculative-d3tree-max-rows", "3"], {}),
        "block": ([*speculative, "--speculative-dflash-block-size", "5"], {}),
        "environment": (
            speculative,
            {
                "SGLANG_D3TREE_POLICY": "chain",
                "SGLANG_D3TREE_MAX_ROWS": "7",
                "SGLANG_D3TREE_TOPK": "3",
                "SGLANG_D3TREE_THRESHOLD": "0.25",
            },
        ),
        "flag over environment": ([*speculative, POLICY, "ddtree"], {"SGLANG_D3TREE_POLICY": "chain"}),
    }
    answers = resolve_all([{"arguments": ["--model-path", target, *a], "environment": e} for a, e in cases.values()])
    for name, answer in zip(cases, answers, strict=True):
        assert answer["error"] is None, f"{name}: {answer['error']}"
    return dict(zip(cases, answers, strict=True))


def test_open_values_are_filled_in(resolved: dict[str, dict[str, Any]]) -> None:
    for name in ("plain", "d3tree"):
        fields = resolved[name]["fields"]
        assert fields["device"] == "cpu"
        assert fields["attention_backend"] == "d3tree_cpu"
        assert 2048 <= fields["max_total_tokens"] <= 131072
        assert fields["max_running_requests"] == 64
        assert fields["disable_overlap_schedule"] is True
        assert fields["sleep_on_idle"] is True
    assert resolved["d3tree"]["fields"]["speculative_draft_attention_backend"] == "d3tree_cpu"


def test_given_values_win(resolved: dict[str, dict[str, Any]]) -> None:
    fields = resolved["plain, given"]["fields"]
    assert fields["max_total_tokens"] == 5000
    assert fields["dtype"] == "float16"
    assert fields["attention_backend"] == "torch_native"
    assert fields["max_running_requests"] == 3


def test_algorithm_name_in_any_case(resolved: dict[str, dict[str, Any]]) -> None:
    assert resolved["lower case"]["fields"] == resolved["d3tree"]["fields"]


def test_verify_width_and_block_size_are_two_things(resolved: dict[str, dict[str, Any]]) -> None:
    """SGLang reserves KV by its verify width, which must cover the rows and the draft block."""
    widths = {
        name: (fields["speculative_num_draft_tokens"], fields["speculative_dflash_block_size"])
        for name, fields in ((name, resolved[name]["fields"]) for name in ("d3tree", "few rows", "block"))
    }
    assert widths == {"d3tree": (32, 8), "few rows": (8, 8), "block": (32, 5)}


def test_environment_counts_and_flags_beat_it(resolved: dict[str, dict[str, Any]]) -> None:
    options = resolved["environment"]["options"]
    assert options["policy"] == "chain"
    assert options["max_rows"] == 7
    assert options["topk"] == 3
    assert options["threshold"] == 0.25
    assert resolved["flag over environment"]["options"]["policy"] == "ddtree"


def test_help_lists_the_flags() -> None:
    """`sglang serve --help` answers before SGLang loads plugins, so only this command can show a plugin's flags."""
    answer = subprocess.run([*LAUNCH, "--help"], capture_output=True, text=True, timeout=300, check=False)
    assert answer.returncode == 0
    for flag in ("policy", "max-rows", "topk", "threshold"):
        assert f"--speculative-d3tree-{flag}" in answer.stdout
    assert "{d3tree,ddtree,caddtree,chain}" in answer.stdout


# ---------------------------------------------------------------- the ways to start

PROMPT = "tao"

ENGINE = """
import json, sys
import sglang

if __name__ == "__main__":
    target, drafter = sys.argv[1:]
    said = []
    for policy, rows in (("chain", 5), ("ddtree", 1)):
        engine = sglang.Engine(
            model_path=target, speculative_algorithm="d3tree", speculative_draft_model_path=drafter, dtype="float32",
            max_total_tokens=4096, speculative_d3tree_policy=policy, speculative_d3tree_max_rows=rows,
        )
        answer = engine.generate("tao", {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True})
        try:
            engine.generate("tao", {"temperature": 0, "max_new_tokens": 4}, return_logprob=True)
            refused = None
        except ValueError as error:
            refused = str(error)
        state = engine.get_server_info()["internal_states"][0]["d3tree"]
        engine.shutdown()
        said.append({"answer": answer, "state": state, "refused": refused})
    print("\\n" + json.dumps(said))
"""


def expected(length: int) -> list[int]:
    target = models.letters_target()
    return greedy_ids(target, tokenizer_of(target)(PROMPT).input_ids, length)


def test_engine_in_python_is_like_the_command_line(tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    answer = subprocess.run(
        [sys.executable, str(script), str(models.letters_target()), str(models.letters_drafter())],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-4000:]
    chain, nothing_drafted = json.loads(answer.stdout.splitlines()[-1])
    for said, policy, rows in ((chain, "chain", 5), (nothing_drafted, "ddtree", 1)):
        assert said["answer"]["output_ids"] == expected(32)
        assert said["state"]["policy"] == policy
        assert said["state"]["max_rows"] == said["state"]["rows_per_request"] == rows
        assert "log probabilities" in said["refused"]
    assert chain["answer"]["meta_info"]["spec_accept_length"] > 1
    assert nothing_drafted["answer"]["meta_info"]["spec_verify_ct"] == 31


@pytest.fixture(scope="module")
def bare() -> Iterator[Server]:
    """The two flags of the README and nothing else, but an environment variable that sets the policy."""
    environment = {"SGLANG_D3TREE_POLICY": "ddtree"}
    flags = ("--model-path", models.letters_target(), "--speculative-algorithm", "d3tree")
    server = Server(*flags, "--speculative-draft-model-path", models.letters_drafter(), environment=environment)
    try:
        yield server.wait_until_ready()
    finally:
        server.stop()


def test_starts_with_no_other_flag(bare: Server) -> None:
    answer = bare.generate(PROMPT, max_new_tokens=32, ignore_eos=True)
    assert len(answer["output_ids"]) == 32
    assert answer["meta_info"]["spec_accept_length"] > 1
    assert bare.internal_state()["d3tree"]["policy"] == "ddtree"


def test_log_says_once_that_there_is_no_trained_head(bare: Server) -> None:
    assert bare.log().count("Survival is the draft path probability (no trained head)") == 1


def test_idle_server_leaves_the_cores_alone(bare: Server) -> None:
    """An idle scheduler that spins would take a core from whoever works."""
    group = [psutil.Process(bare.process.pid), *psutil.Process(bare.process.pid).children(recursive=True)]
    bare.generate(PROMPT, max_new_tokens=4)
    time.sleep(2)
    before = sum(sum(process.cpu_times()[:2]) for process in group)
    time.sleep(5)
    assert sum(sum(process.cpu_times()[:2]) for process in group) - before < 1.0


def test_no_process_survives_the_main_one(bare: Server) -> None:
    """Last test of this server."""
    main = psutil.Process(bare.process.pid)
    children = main.children(recursive=True)
    assert len(children) >= 2
    main.kill()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive, [process.cmdline() for process in alive]
