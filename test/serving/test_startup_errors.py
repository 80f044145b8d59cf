"""A server that cannot serve D3TREE says why before it loads a model: one sentence that names the flag."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support import models
from support.resolve import resolve_all
from support.servers import LAUNCH, SERVE

pytestmark = pytest.mark.timeout(600)


def changed_copy(drafter: Path, out: Path, **changes: Any) -> Path:
    """A draft checkpoint with another config.json; None removes a key, ``dflash_config`` is merged."""
    out.mkdir()
    config = json.loads((drafter / "config.json").read_text())
    for key, value in changes.items():
        if key == "dflash_config":
            config[key] = {k: v for k, v in {**config[key], **value}.items() if v is not None}
        else:
            config[key] = value
    (out / "config.json").write_text(json.dumps(config))
    (out / "model.safetensors").symlink_to(drafter / "model.safetensors")
    return out


def unknown_target(out: Path) -> Path:
    """A text model whose architecture D3TREE has no verifier entry for."""
    out.mkdir()
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 8192,
    }
    (out / "config.json").write_text(json.dumps(config))
    return out


def drafter_with_other_head(out: Path) -> Path:
    """The letters drafter beside a head that was made for the same drafter with other weights."""
    models.letters_drafter_with_head(out, "linear")
    weights = {name: value * 1.5 for name, value in load_file(out / "model.safetensors").items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def d3tree(target: Path, drafter: Path | str | None, *flags: str) -> list[str]:
    arguments = ["--model-path", str(target), "--speculative-algorithm", "d3tree"]
    if drafter is not None:
        arguments += ["--speculative-draft-model-path", str(drafter)]
    return [*arguments, *flags]


# What is wrong -> words of the sentence, the flag first.
EXPECTED = {
    "no draft path": ["--speculative-draft-model-path"],
    "draft path that is not there": ["--speculative-draft-model-path", "config.json"],
    "drafter of another hidden size": ["--speculative-draft-model-path", "hidden_size", "128", "64"],
    "drafter of another vocabulary": ["--speculative-draft-model-path", "vocab_size", "1000", "64"],
    "drafter without mask token": ["--speculative-draft-model-path", "mask_token_id"],
    "mask token outside the vocabulary": ["--speculative-draft-model-path", "mask_token_id", "64"],
    "layer the target does not have": ["--speculative-draft-model-path", "layers"],
    "not a drafter": ["--speculative-draft-model-path", "DFlashDraftModel"],
    "checkpoint of block size 1": ["--speculative-draft-model-path", "block_size", "at least 2"],
    "block size 1": ["--speculative-dflash-block-size", "at least 2"],
    "unknown policy": ["--speculative-d3tree-policy", "d3tree, ddtree, caddtree, chain", "beam"],
    "no rows": ["--speculative-d3tree-max-rows", "1", "0"],
    "rows that are no number": ["--speculative-d3tree-max-rows", "int", "many"],
    "no candidates": ["--speculative-d3tree-topk", "-1"],
    "head that is not there": ["--speculative-d3tree-head", "path", "d3tree train head"],
    "head of another drafter": ["--speculative-d3tree-head", "another drafter", "none"],
    "threshold above 1": ["--speculative-d3tree-threshold", "1.0", "2"],
    "more least rows than rows": ["--speculative-d3tree-min-rows", "--speculative-d3tree-max-rows", "9", "8"],
    "horizon that is no switch": ["--speculative-d3tree-adaptive-horizon", "sometimes"],
    "cost profile that is not there": ["--speculative-d3tree-cost-profile", "nowhere.json", "d3tree calibrate"],
    "cost profile that is none": ["--speculative-d3tree-cost-profile", "config.json", "d3tree calibrate"],
    "token map that is none": ["--speculative-token-map", "config.json"],
    "wrong environment variable": ["--speculative-d3tree-policy", "beam"],
    "other attention backend": ["--attention-backend", "torch_native", "d3tree_cpu"],
    "unknown architecture": ["--model-path", "Qwen2ForCausalLM", "Qwen2_5_VLForConditionalGeneration"],
    "a GPU": ["--device", "cuda"],
    "LoRA": ["--enable-lora"],
    "two pipeline stages": ["--pp-size"],
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every wrong start-up, resolved in one process, and a right one to show that nothing sticks."""
    target, drafter = models.letters_target(), models.letters_drafter()
    place = tmp_path_factory.mktemp("drafters")
    mask = {"mask_token_id": None}
    cases: dict[str, list[str]] = {
        "no draft path": d3tree(target, None),
        "draft path that is not there": d3tree(target, place / "nothing-here"),
        "drafter of another hidden size": d3tree(target, changed_copy(drafter, place / "hidden", hidden_size=128)),
        "drafter of another vocabulary": d3tree(target, changed_copy(drafter, place / "vocab", vocab_size=1000)),
        "drafter without mask token": d3tree(target, changed_copy(drafter, place / "mask", dflash_config=mask)),
        "mask token outside the vocabulary": d3tree(
            target, changed_copy(drafter, place / "far-mask", dflash_config={"mask_token_id": 64})
        ),
        "layer the target does not have": d3tree(
            target, changed_copy(drafter, place / "layers", dflash_config={"target_layer_ids": [0, 1, 3]})
        ),
        "not a drafter": d3tree(target, target),
        "checkpoint of block size 1": d3tree(target, changed_copy(drafter, place / "block", block_size=1)),
        "block size 1": d3tree(target, drafter, "--speculative-dflash-block-size", "1"),
        "unknown policy": d3tree(target, drafter, "--speculative-d3tree-policy", "beam"),
        "no rows": d3tree(target, drafter, "--speculative-d3tree-max-rows", "0"),
        "rows that are no number": d3tree(target, drafter, "--speculative-d3tree-max-rows", "many"),
        "no candidates": d3tree(target, drafter, "--speculative-d3tree-topk=-1"),
        "head that is not there": d3tree(target, drafter, "--speculative-d3tree-head", "path"),
        "head of another drafter": d3tree(target, drafter_with_other_head(place / "head")),
        "threshold above 1": d3tree(target, drafter, "--speculative-d3tree-threshold", "2"),
        "more least rows than rows": d3tree(
            target, drafter, "--speculative-d3tree-min-rows", "9", "--speculative-d3tree-max-rows", "8"
        ),
        "horizon that is no switch": d3tree(target, drafter, "--speculative-d3tree-adaptive-horizon", "sometimes"),
        "cost profile that is not there": d3tree(target, drafter, "--speculative-d3tree-cost-profile", "nowhere.json"),
        "cost profile that is none": d3tree(
            target, drafter, "--speculative-d3tree-cost-profile", str(drafter / "config.json")
        ),
        "token map that is none": d3tree(target, drafter, "--speculative-token-map", str(drafter / "config.json")),
        "wrong environment variable": d3tree(target, drafter),
        "other attention backend": d3tree(target, drafter, "--attention-backend", "torch_native"),
        "unknown architecture": d3tree(unknown_target(place / "qwen2"), drafter),
        "a GPU": d3tree(target, drafter, "--device", "cuda"),
        "LoRA": d3tree(target, drafter, "--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj"),
        "two pipeline stages": d3tree(target, drafter, "--pp-size", "2"),
        "nothing": d3tree(target, drafter),
    }
    environments = {"wrong environment variable": {"SGLANG_D3TREE_POLICY": "beam"}}
    answers = resolve_all(
        [{"arguments": arguments, "environment": environments.get(name, {})} for name, arguments in cases.items()]
    )
    return dict(zip(cases, answers, strict=True))


@pytest.mark.parametrize("wrong", EXPECTED)
def test_error_is_one_sentence_that_names_the_flag(wrong: str, outcomes: dict[str, dict[str, Any]]) -> None:
    sentence = outcomes[wrong]["error"]
    assert sentence is not None, f"{wrong} started"
    for word in EXPECTED[wrong]:
        assert word in sentence, sentence
    assert "\n" not in sentence.strip()
    assert sentence.rstrip().endswith("."), sentence
    assert len(sentence) < 600, sentence


def test_right_flags_resolve_after_all_the_wrong_ones(outcomes: dict[str, dict[str, Any]]) -> None:
    assert outcomes["nothing"]["error"] is None


# ---------------------------------------------------------------- through the real command line


def start(
    entry: Sequence[str], arguments: list[str], environment: dict[str, str] | None = None
) -> tuple[int, list[str]]:
    """Exit code and last output lines of a start-up that must fail."""
    answer = subprocess.run(
        [*entry, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
        check=False,
    )
    return answer.returncode, answer.stdout.strip().splitlines()


def test_launch_server_ends_with_the_sentence() -> None:
    arguments = d3tree(models.letters_target(), models.letters_drafter(), "--speculative-d3tree-max-rows", "0")
    code, lines = start(LAUNCH, arguments)
    assert code not in (0, None)
    assert "--speculative-d3tree-max-rows" in lines[-1], "\n".join(lines[-20:])
    assert lines[-1].endswith("got '0'.")


def test_sglang_serve_ends_with_the_sentence() -> None:
    code, lines = start(SERVE, d3tree(models.letters_target(), None))
    assert code not in (0, None)
    assert "--speculative-draft-model-path" in lines[-1], "\n".join(lines[-20:])


def test_other_sglang_release_is_refused_by_name(tmp_path: Path) -> None:
    """The plugin is loaded by a process that believes SGLang 0.5.22 is installed."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as metadata\n"
        "real = metadata.version\n"
        "metadata.version = lambda name: '0.5.22' if name == 'sglang' else real(name)\n"
    )
    arguments = d3tree(models.letters_target(), models.letters_drafter())
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    code, lines = start(LAUNCH, arguments, {"PYTHONPATH": path})
    assert code not in (0, None)
    assert "0.5.22" in lines[-1] and "sglang==0.5.23" in lines[-1], "\n".join(lines[-20:])
    assert "--speculative-algorithm d3tree" in lines[-1]
