"""Trained tree-size heads on disk: beside the drafter whose states they read, and for no other."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sglang_d3tree.fingerprint import checkpoint_fingerprint, language_fingerprint
from sglang_d3tree.tree.head import HeadWeights, PathWeights

FLAG = "--speculative-d3tree-head"
KINDS = ("linear", "path")
# Not in the drafter's own directory: SGLang takes every safetensors file there for the drafter's weights.
FOLDER = "tree_head"
FORMAT = "d3tree-head-2"
"""1: path heads read log-probabilities; 2: the draft's odds (``tree.head.draft_odds``)."""


@dataclass(frozen=True)
class HeadFile:
    """A head and what it was trained with: candidates per depth, and the report of its training."""

    weights: HeadWeights
    topk: int
    report: dict[str, object]


def head_path(drafter_dir: Path | str, kind: str) -> Path:
    """Where a drafter's head of this kind lies."""
    return Path(drafter_dir) / FOLDER / f"{kind}.safetensors"


def save_head(drafter_dir: Path | str, target_dir: Path | str, head: HeadFile) -> Path:
    """Write a head beside its drafter (atomically), with the fingerprints of drafter and target."""
    weights = head.weights
    path = head_path(drafter_dir, weights.kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        "state": weights.state,
        "token": weights.token,
        "log_prob": weights.log_prob.reshape(1),
        "bias": weights.bias.reshape(1),
    }
    if weights.path is not None:
        tensors |= {
            "path.parent": weights.path.parent,
            "path.query": weights.path.query,
            "path.child": weights.path.child,
        }
    metadata = {
        "format": FORMAT,
        "kind": weights.kind,
        "exclusive": json.dumps(weights.exclusive),
        "topk": str(head.topk),
        "drafter": checkpoint_fingerprint(drafter_dir),
        "target": language_fingerprint(target_dir),
        "report": json.dumps(head.report),
    }
    partial = path.with_suffix(".partial")
    save_file({name: t.detach().float().contiguous() for name, t in tensors.items()}, partial, metadata)
    partial.chmod(0o644)  # safetensors writes for the owner only
    os.replace(partial, path)
    return path


def load_head(drafter_dir: Path | str, target_dir: Path | str, choice: str = "auto") -> HeadFile | None:
    """The head that ``choice`` names: none, linear, path, or auto, the best kind there is (path before linear).

    Raises:
        ValueError: one sentence naming the flag, for a head that is missing, unreadable, or was trained for another
            drafter or target.
    """
    if choice == "none":
        return None
    kinds = tuple(reversed(KINDS)) if choice == "auto" else (choice,)
    path = next((p for p in (head_path(drafter_dir, kind) for kind in kinds) if p.exists()), None)
    if path is None:
        if choice == "auto":
            return None
        raise ValueError(
            f"{FLAG} {choice}: there is no {head_path(drafter_dir, choice)}; train one with 'd3tree train head --kind "
            f"{choice}', or use {FLAG} none."
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        head = _read(metadata, tensors)
        trained_for = {role: metadata[role] for role in ("drafter", "target")}
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"{FLAG} {choice}: {path} is not a readable head of format {FORMAT} ({error}); use {FLAG} none to serve "
            "without it."
        ) from error
    found = {"drafter": checkpoint_fingerprint(drafter_dir), "target": language_fingerprint(target_dir)}
    for role, fingerprint in trained_for.items():
        if fingerprint != found[role]:
            raise ValueError(
                f"{FLAG} {choice}: {path} was trained for another {role} ({fingerprint}, this one is {found[role]}); "
                f"train it again with 'd3tree train head', or use {FLAG} none."
            )
    return head


def _read(metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> HeadFile:
    if metadata["format"] != FORMAT:
        raise ValueError(f"it has format {metadata['format']}: train it again with 'd3tree train head'")
    path = None
    if metadata["kind"] == "path":
        path = PathWeights(tensors["path.parent"], tensors["path.query"], tensors["path.child"])
    weights = HeadWeights(
        state=tensors["state"],
        token=tensors["token"],
        log_prob=tensors["log_prob"].squeeze(0),
        bias=tensors["bias"].squeeze(0),
        path=path,
        exclusive=json.loads(metadata["exclusive"]),
    )
    return HeadFile(weights, int(metadata["topk"]), json.loads(metadata["report"]))
