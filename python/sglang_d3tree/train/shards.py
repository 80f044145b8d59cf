"""Shards of training data on disk, and the record of what they were made with."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sglang_d3tree.train.answers import Conversation
from sglang_d3tree.train.prompts import KINDS

DATASET_FILE = "dataset.json"


def save_shard(path: Path, conversations: Sequence[Conversation]) -> None:
    """Write one shard atomically.

    tokens: int32 [N], all conversations end to end. offsets: int64 [n + 1]. prompt_lengths: int32 [n].
    temperatures: float32 [n]. kinds: int32 [n], indices into KINDS. held_out: bool [n]. hidden: bfloat16 [N, K * H].
    final: bfloat16 [N, H].
    """
    lengths = torch.tensor([0] + [len(c.tokens) for c in conversations])
    tensors = {
        "tokens": torch.tensor([t for c in conversations for t in c.tokens], dtype=torch.int32),
        "offsets": lengths.cumsum(0),
        "prompt_lengths": torch.tensor([c.prompt_length for c in conversations], dtype=torch.int32),
        "temperatures": torch.tensor([c.temperature for c in conversations]),
        "kinds": torch.tensor([KINDS.index(c.kind) for c in conversations], dtype=torch.int32),
        "held_out": torch.tensor([c.held_out for c in conversations]),
        "hidden": torch.cat([c.hidden for c in conversations]).to(torch.bfloat16),
        "final": torch.cat([c.final for c in conversations]).to(torch.bfloat16),
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    os.replace(partial, path)


def load_shard(path: Path) -> list[Conversation]:
    """The conversations of one shard; their hidden states stay in the memory-mapped file."""
    t = load_file(path)
    offsets = t["offsets"].tolist()
    return [
        Conversation(
            tokens=t["tokens"][a:b].tolist(),
            prompt_length=int(t["prompt_lengths"][i]),
            temperature=float(t["temperatures"][i]),
            kind=KINDS[int(t["kinds"][i])],
            held_out=bool(t["held_out"][i]),
            hidden=t["hidden"][a:b],
            final=t["final"][a:b],
        )
        for i, (a, b) in enumerate(itertools.pairwise(offsets))
    ]


def shard_paths(data_dir: Path) -> list[Path]:
    """Complete shards in order."""
    return sorted(data_dir.glob("shard-*.safetensors"))


@dataclass(frozen=True)
class DataOptions:
    """Everything a shard's content depends on, besides its index."""

    seed: int = 0
    per_shard: int = 160
    max_new: int = 128
    long_max_new: int = 192
    long_every: int = 5
    sampled_share: float = 0.33
    temperature: float = 0.7
    capture: tuple[int, ...] = ()
    target: str = ""


def claim_directory(out_dir: Path, options: DataOptions) -> None:
    """Record the options, or refuse to mix shards made with different ones."""
    out_dir.mkdir(parents=True, exist_ok=True)
    record = out_dir / DATASET_FILE
    wanted = json.loads(json.dumps(asdict(options)))
    if record.exists():
        found = json.loads(record.read_text())
        if found != wanted:
            raise ValueError(f"{out_dir} holds data made with other options ({found}, not {wanted})")
        return
    record.write_text(json.dumps(wanted, indent=2) + "\n")


def read_options(data_dir: Path) -> DataOptions:
    """The options a data directory was made with."""
    raw = json.loads((data_dir / DATASET_FILE).read_text())
    return DataOptions(**{**raw, "capture": tuple(raw["capture"])})
