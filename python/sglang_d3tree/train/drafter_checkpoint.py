"""Drafters that fit a target: initial weights, and the checkpoint format SGLang loads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sglang_d3tree.demo.target import CONTEXT_LENGTH, atomic_directory
from sglang_d3tree.train.drafter_model import DrafterConfig, DrafterModel
from sglang_d3tree.train.tower import default_capture_layers

# What tokenizers call special tokens that no text is encoded to.
_RESERVED = ("mask", "reserved", "unused", "empty_output")


@dataclass(frozen=True)
class TargetEnds:
    """The target's frozen ends. embedding, head: [V, H] float32; layers: raw tensors for the warm start."""

    embedding: torch.Tensor
    head: torch.Tensor
    norm: torch.Tensor
    raw: dict[str, torch.Tensor] = field(repr=False)


def load_target_ends(target_dir: Path) -> TargetEnds:
    """Embedding, LM head and final norm of a target checkpoint."""
    raw = {
        k.removeprefix("model."): v
        for k, v in load_file(target_dir / "model.safetensors").items()
        if not k.startswith("visual.")
    }
    embedding = raw["embed_tokens.weight"].float()
    head = raw["lm_head.weight"].float() if "lm_head.weight" in raw else embedding
    return TargetEnds(embedding, head, raw["norm.weight"].float(), raw)


def drafter_config(
    target_dir: Path,
    *,
    layers: int = 2,
    block_size: int = 8,
    intermediate_size: int | None = None,
    target_layer_ids: Sequence[int] | None = None,
    mask_token_id: int | None = None,
) -> DrafterConfig:
    """A drafter that fits the target: same width, heads and rotary base.

    Raises:
        ValueError: naming ``--target``, where there is no readable config.json or an unknown family.
    """
    text = _text_config(target_dir)
    heads, rope = text["num_attention_heads"], text["rope_parameters"]
    return DrafterConfig(
        hidden_size=text["hidden_size"],
        intermediate_size=intermediate_size or text["intermediate_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=text["num_key_value_heads"],
        head_dim=text.get("head_dim") or text["hidden_size"] // heads,
        vocab_size=text["vocab_size"],
        rms_norm_eps=text["rms_norm_eps"],
        rope_theta=rope["rope_theta"],
        block_size=block_size,
        num_target_layers=text["num_hidden_layers"],
        target_layer_ids=tuple(target_layer_ids or default_capture_layers(text["num_hidden_layers"])),
        mask_token_id=_mask_token(target_dir, text["vocab_size"]) if mask_token_id is None else mask_token_id,
    )


def _mask_token(target_dir: Path, vocabulary: int) -> int:
    """An id that text never contains: the demo's, a reserved token's, or one that the tokenizer leaves free.

    Raises:
        ValueError: naming ``--target``, where every id is in use.
    """
    path = target_dir / "tokenizer.json"
    if not path.exists():
        raise ValueError(f"--target {target_dir} has no tokenizer.json to choose a mask token from.")
    raw = json.loads(path.read_text())
    added = {token["content"]: token["id"] for token in raw["added_tokens"]}
    used = {*added.values(), *raw["model"]["vocab"].values()}
    reserved = [i for name, i in added.items() if any(word in name.lower() for word in _RESERVED) and i < vocabulary]
    if reserved:
        return max(reserved)
    free = next((i for i in range(max(used) + 1, vocabulary)), None)
    if free is None:
        raise ValueError(f"--target {target_dir} has no reserved token and no free id that could be a mask token.")
    return free


def _text_config(target_dir: Path) -> dict[str, Any]:
    """The language tower's settings, defaults of its family included."""
    from transformers import AutoConfig

    from sglang_d3tree.runtime.verifiers import check_family

    if not (target_dir / "config.json").exists():
        raise ValueError(f"--target {target_dir} is no checkpoint directory: it has no config.json.")
    config = AutoConfig.from_pretrained(target_dir)
    check_family(list(config.architectures or []), "--target")
    text: dict[str, Any] = config.get_text_config().to_dict()
    return text


def new_drafter(config: DrafterConfig, seed: int) -> DrafterModel:
    """Random weights from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DrafterModel(config)
        for name, p in model.named_parameters():
            if p.ndim == 2:
                # Small outputs into the residual stream at first, as usual for transformers.
                scale = (2 * config.num_layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                nn.init.normal_(p, std=scale * p.shape[1] ** -0.5)
    return model


@torch.no_grad()
def warm_start(model: DrafterModel, ends: TargetEnds) -> None:
    """Start the drafter's layers as copies of the target's last ones, where the sizes agree.

    The last layers already turn context into next-token predictions; ``fc`` starts by passing on the deepest
    captured state, which is (nearly) what those layers read in the target. On two CPU cores this saves more training
    time than any other choice.
    """
    c = model.config
    first = c.num_target_layers - c.num_layers
    for i, layer in enumerate(model.layers):
        prefix = f"layers.{first + i}."
        own = {k.removeprefix(prefix): v.float() for k, v in ends.raw.items() if k.startswith(prefix)}
        state = layer.state_dict()
        for name, value in state.items():
            if name in own and own[name].shape == value.shape:
                state[name] = own[name]
        gain = own["input_layernorm.weight"]
        for part in "qk":
            # Rows' typical output size on normalised input: what q_norm/k_norm would otherwise take away.
            rms = (own[f"self_attn.{part}_proj.weight"] * gain).square().sum(dim=1).mean().sqrt()
            state[f"self_attn.{part}_norm.weight"] = torch.full_like(state[f"self_attn.{part}_norm.weight"], float(rms))
        layer.load_state_dict(state)
    model.fc.weight.mul_(0.1)
    model.fc.weight[:, -c.hidden_size :] += torch.eye(c.hidden_size)
    model.hidden_norm.weight.copy_(ends.raw[f"layers.{first}.input_layernorm.weight"].float())
    model.norm.weight.copy_(ends.norm)


def save_dflash_checkpoint(model: DrafterModel, out_dir: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write config.json and model.safetensors as SGLang's DFlash loader reads them (atomically)."""
    from transformers import Qwen3Config

    c = model.config
    dflash: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "block_size": c.block_size,
        "num_target_layers": c.num_target_layers,
        "dflash_config": {"target_layer_ids": list(c.target_layer_ids), "mask_token_id": c.mask_token_id},
        "dtype": str(dtype).removeprefix("torch."),
    }
    config = Qwen3Config(
        **dflash,
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=False,
        attention_bias=False,
    )
    with atomic_directory(out_dir) as scratch:
        config.save_pretrained(scratch)
        state = {k: v.detach().to(dtype).contiguous() for k, v in model.state_dict().items()}
        save_file(state, scratch / "model.safetensors", metadata={"format": "pt"})
        (scratch / "model.safetensors").chmod(0o644)  # safetensors writes for the owner only
    return out_dir


def load_dflash_checkpoint(path: Path) -> DrafterModel:
    """The inverse of ``save_dflash_checkpoint``, in float32."""
    raw = json.loads((path / "config.json").read_text())
    config = DrafterConfig(
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        vocab_size=raw["vocab_size"],
        rms_norm_eps=raw["rms_norm_eps"],
        rope_theta=raw["rope_parameters"]["rope_theta"],
        block_size=raw["block_size"],
        num_target_layers=raw["num_target_layers"],
        target_layer_ids=tuple(raw["dflash_config"]["target_layer_ids"]),
        mask_token_id=raw["dflash_config"]["mask_token_id"],
    )
    model = DrafterModel(config)
    model.load_state_dict({k: v.float() for k, v in load_file(path / "model.safetensors").items()})
    return model


def init_drafter(
    target_dir: Path | str,
    out_dir: Path | str,
    *,
    layers: int = 2,
    block_size: int = 8,
    seed: int = 0,
    warm: bool = False,
    **config: Any,
) -> Path:
    """Write an untrained drafter that fits ``target_dir`` (random, or warm-started from the target's layers)."""
    target_dir, out_dir = Path(target_dir), Path(out_dir)
    model = new_drafter(drafter_config(target_dir, layers=layers, block_size=block_size, **config), seed)
    if warm:
        warm_start(model, load_target_ends(target_dir))
    return save_dflash_checkpoint(model, out_dir)
