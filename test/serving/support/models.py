"""The checkpoints the serving tests run on, built where they are missing."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sglang_d3tree.demo.target import ASSETS, MASK_TOKEN_ID, atomic_directory, build_target, build_tiny_target
from sglang_d3tree.head_file import HeadFile, save_head
from sglang_d3tree.train.drafter import init_drafter
from sglang_d3tree.tree.head import HeadWeights, PathWeights

REPOSITORY = Path(__file__).parents[3]
CACHE = Path(os.environ.get("SGLANG_D3TREE_CACHE", REPOSITORY / ".cache" / "d3tree"))

# Ids 17 and up are single characters; these four are what the letters target mostly emits.
LETTERS = (18, 19, 20, 21)
LETTER_LEAD = 4.0


@cache
def real_target() -> Path:
    """SmolLM2-135M in a Qwen2.5-VL shell, the one `make demo` serves."""
    return build_target(CACHE / "target")


@cache
def real_drafter() -> Path:
    """The best drafter there is for the real target: trained if one was made, else untrained.

    Losslessness holds for any; a trained one has accepted paths worth testing.
    """
    for path in (ASSETS / "drafter", CACHE / "drafter", CACHE / "drafter-wip"):
        if (path / "config.json").exists():
            return path
    return _drafter(real_target(), CACHE / "drafter-random")


@cache
def letters_target() -> Path:
    """A random four-layer VLM of 64 token ids whose text is, nearly always, made of four letters.

    Which letter comes next depends on the whole context, but any drafter proposes the four: trees of a few dozen
    rows hold long accepted paths, and a distribution has few enough cells to be measured. How: the embeddings of the
    letters share one large coordinate, which survives the layers and is read by the (tied) head.
    """
    out = CACHE / "test-letters-target"
    source = build_tiny_target(CACHE / "tiny-target-v64", vocab_size=64)
    if _made_by(out) == _recipe():
        return out
    weights = {name: value.float() for name, value in load_file(source / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(2)
    embedding, norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
    noise = torch.randn(embedding.shape, generator=generator)
    embedding[list(LETTERS)] = 0.25 * noise[list(LETTERS)]
    embedding[:, 0] = 0.0
    embedding[list(LETTERS), 0] = LETTER_LEAD
    embedding[MASK_TOKEN_ID, 0] = 0.75 * LETTER_LEAD
    # Random signs keep the head from preferring the token that was read; 0.3 sets the letters' lead over the rest.
    norm.copy_(torch.randint(0, 2, norm.shape, generator=generator) * 2.0 - 1.0)
    norm[0] = 0.3
    for name, value in weights.items():
        if name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight")):
            # Sharp attention: the next letter depends on single earlier ones.
            value.mul_(4.0)
    with atomic_directory(out) as scratch:
        shutil.copytree(source, scratch, dirs_exist_ok=True)
        stored = {name: value.bfloat16().contiguous() for name, value in weights.items()}
        save_file(stored, scratch / "model.safetensors", metadata={"format": "pt"})
        (scratch / "d3tree_manifest.json").unlink()
        (scratch / "recipe").write_bytes(_recipe())
    return out


@cache
def letters_drafter() -> Path:
    """An untrained drafter for the letters target that finds the four letters about equally likely everywhere."""
    target, out = letters_target(), CACHE / "test-letters-drafter"
    if _made_by(out) == _recipe():
        return out
    with atomic_directory(out) as scratch:
        init_drafter(target, scratch / "drafter")
        for path in (scratch / "drafter").iterdir():
            path.rename(scratch / path.name)
        (scratch / "drafter").rmdir()
        weights = load_file(scratch / "model.safetensors")
        weights["norm.weight"] = weights["norm.weight"] * 0.15
        save_file(weights, scratch / "model.safetensors", metadata={"format": "pt"})
        (scratch / "recipe").write_bytes(_recipe())
    return out


def letters_drafter_with_head(out: Path, kind: str) -> Path:
    """A copy of the letters drafter with an untrained head of this kind: wrong about everything, as a head may be."""
    shutil.copytree(letters_drafter(), out)
    width = load_file(letters_target() / "model.safetensors")["model.embed_tokens.weight"].shape[1]
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    path = PathWeights(draw(4, width), draw(4, width), draw(4, width)) if kind == "path" else None
    weights = HeadWeights(draw(width), draw(width), torch.tensor(0.5), torch.tensor(1.0), path, exclusive=True)
    save_head(out, letters_target(), HeadFile(weights, 6, {}))
    return out


def _recipe() -> bytes:
    """Everything that a build here depends on."""
    return Path(__file__).read_bytes() + (CACHE / "tiny-target-v64" / "model.safetensors").read_bytes()


def _made_by(out: Path) -> bytes | None:
    return (out / "recipe").read_bytes() if (out / "recipe").exists() else None


def _drafter(target: Path, out: Path) -> Path:
    return out if (out / "config.json").exists() else init_drafter(target, out)
