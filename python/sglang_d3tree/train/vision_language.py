"""The language tower, as lean as training through it allows.

Aligning the vision tower needs gradients *through* 135M frozen weights to 16 image tokens and to a small adapter, again
and again on two CPU cores. This forward does only that: fused projections, no gradients of the big matrices, the
constant start of every chat kept as keys and values, and several questions about one image packed into a row (each
sees the image and itself). A test holds it against transformers' Qwen2.5-VL.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn


@dataclass(frozen=True)
class Block:
    """One layer's weights; matrices are [out, in]."""

    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Prefix:
    """Keys and values of the tokens every chat starts with: per layer [kv_heads, P, head_dim]."""

    keys: list[Tensor]
    values: list[Tensor]

    @property
    def length(self) -> int:
        return self.keys[0].shape[1] if self.keys else 0


@dataclass(frozen=True)
class Language:
    """The language tower of a Qwen2.5-VL checkpoint, frozen.

    Matrices may be bfloat16: CPUs with bfloat16 dot products multiply twice as fast. The residual stream, norms and
    attention stay in float32.
    """

    embed: Tensor
    """[V, H] float32."""
    head: Tensor
    """[V, H], the embedding in the matrices' dtype."""
    blocks: list[Block]
    norm: Tensor
    heads: int
    kv_heads: int
    eps: float
    inverse_frequencies: Tensor
    """[head_dim / 2]"""
    mrope_section: tuple[int, ...]

    @property
    def head_dim(self) -> int:
        return 2 * self.inverse_frequencies.shape[0]


def load_language(checkpoint: Path, dtype: torch.dtype = torch.float32) -> Language:
    """dtype: of the matrices."""
    config = json.loads((checkpoint / "config.json").read_text())["text_config"]
    weights = {k: v.float() for k, v in load_file(checkpoint / "model.safetensors").items()}
    blocks = []
    for i in range(config["num_hidden_layers"]):
        layer = {k.removeprefix(f"model.layers.{i}."): v for k, v in weights.items() if f".layers.{i}." in k}
        projections = [f"self_attn.{part}_proj" for part in "qkv"]
        blocks.append(
            Block(
                attn_norm=layer["input_layernorm.weight"],
                qkv=torch.cat([layer[f"{p}.weight"] for p in projections]).to(dtype),
                qkv_bias=torch.cat([layer[f"{p}.bias"] for p in projections]),
                out=layer["self_attn.o_proj.weight"].to(dtype),
                mlp_norm=layer["post_attention_layernorm.weight"],
                gate_up=torch.cat([layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]]).to(dtype),
                down=layer["mlp.down_proj.weight"].to(dtype),
            )
        )
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    rope = config["rope_parameters"]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return Language(
        embed=weights["model.embed_tokens.weight"],
        head=weights["model.embed_tokens.weight"].to(dtype),
        blocks=blocks,
        norm=weights["model.norm.weight"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        eps=config["rms_norm_eps"],
        inverse_frequencies=1.0 / rope["rope_theta"] ** exponents,
        mrope_section=tuple(rope["mrope_section"]),
    )


def _rotary(lm: Language, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, [B, 1, L, head_dim]; positions: [3, B, L] (time, height, width), each owning its frequencies."""
    angles = positions[..., None].float() * lm.inverse_frequencies  # [3, B, L, head_dim / 2]
    parts = angles.split(list(lm.mrope_section), dim=-1)
    half = torch.cat([part[i] for i, part in enumerate(parts)], dim=-1)
    full = torch.cat([half, half], dim=-1)[:, None]
    return full.cos(), full.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


MATRICES = ("qkv", "out", "gate_up", "down")
"""The fields of `Block` that an adapter changes."""


class Adapter(nn.Module):
    """Low-rank changes to every matrix of the language tower (LoRA): W + up @ down, up starting at zero."""

    def __init__(self, lm: Language, rank: int, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        layers = len(lm.blocks)
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        for name in MATRICES:
            rows, columns = getattr(lm.blocks[0], name).shape
            noise = torch.randn(layers, rank, columns, generator=generator)
            self.down[name] = nn.Parameter(noise * columns**-0.5)
            self.up[name] = nn.Parameter(torch.zeros(layers, rows, rank))

    def change(self, layer: int, name: str, x: Tensor) -> Tensor:
        """What the adapter adds to x [..., in] times the matrix: [..., out]."""
        return F.linear(F.linear(x, self.down[name][layer].to(x.dtype)), self.up[name][layer].to(x.dtype))


def _project(x: Tensor, lm: Language, layer: int, name: str, adapter: Adapter | None) -> Tensor:
    """x [..., in] float32 through one matrix of one layer, in float32."""
    matrix = getattr(lm.blocks[layer], name)
    x = x.to(matrix.dtype)
    out = F.linear(x, matrix)
    return (out if adapter is None else out + adapter.change(layer, name, x)).float()


def forward(
    lm: Language,
    embeds: Tensor,
    positions: Tensor,
    mask: Tensor,
    prefix: Prefix | None = None,
    adapter: Adapter | None = None,
) -> tuple[Tensor, Prefix]:
    """Final hidden states (normalised) and this call's own keys and values of row 0.

    embeds: [B, L, H]; positions: [3, B, L]; mask: bool [B, 1, L, P + L], true where a query may look.
    """
    batch, length, hidden = embeds.shape
    widths = [lm.heads * lm.head_dim, lm.kv_heads * lm.head_dim, lm.kv_heads * lm.head_dim]
    cos, sin = _rotary(lm, positions)
    # SDPA adds a float mask; converting it once is cheaper than in each of 30 layers.
    bias = torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))
    keys, values = [], []
    x = embeds
    for i, block in enumerate(lm.blocks):
        normed = F.rms_norm(x, (hidden,), block.attn_norm, lm.eps)
        q, k, v = (
            part.view(batch, length, -1, lm.head_dim).transpose(1, 2)
            for part in (_project(normed, lm, i, "qkv", adapter) + block.qkv_bias).split(widths, dim=-1)
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        keys.append(k[0].detach())
        values.append(v[0].detach())
        if prefix is not None:
            k = torch.cat([prefix.keys[i].expand(batch, -1, -1, -1), k], dim=2)
            v = torch.cat([prefix.values[i].expand(batch, -1, -1, -1), v], dim=2)
        # Query heads of one KV head become extra query rows: no repeated keys and values.
        group = lm.heads // lm.kv_heads
        folded = q.reshape(batch, lm.kv_heads, group * length, lm.head_dim)
        attended = F.scaled_dot_product_attention(folded, k, v, attn_mask=bias.repeat(1, 1, group, 1))
        attended = attended.reshape(batch, lm.heads, length, lm.head_dim)
        x = x + _project(attended.transpose(1, 2).reshape(batch, length, -1), lm, i, "out", adapter)
        normed = F.rms_norm(x, (hidden,), block.mlp_norm, lm.eps)
        gate, up = _project(normed, lm, i, "gate_up", adapter).chunk(2, dim=-1)
        x = x + _project(F.silu(gate) * up, lm, i, "down", adapter)
    return F.rms_norm(x, (hidden,), lm.norm, lm.eps), Prefix(keys, values)


def read(lm: Language, ids: Tensor, adapter: Adapter | None = None) -> tuple[Tensor, Prefix]:
    """Final hidden states [P, H], keys and values of the text `ids` [P] at positions 0 .. P-1."""
    length = ids.shape[0]
    positions = torch.arange(length).expand(3, 1, length)
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    hidden, prefix = forward(lm, lm.embed[ids][None], positions, mask, adapter=adapter)
    return hidden[0], prefix


def to_words(lm: Language, hidden: Tensor) -> Tensor:
    """Final hidden states [..., H] -> logits [..., V] float32."""
    return F.linear(hidden.to(lm.head.dtype), lm.head).float()


# --- packing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """One question and answer after the image: `prompt` ids up to the answer, `answer` ids with the end of turn."""

    prompt: list[int]
    answer: list[int]
    weights: list[float]
    """One loss weight per answer token."""


@dataclass(frozen=True)
class Pack:
    """A batch of rows `[image block, segment, segment, ...]`, padded to one length L.

    ids: [B, L]; positions: [3, B, L]; mask: bool [B, 1, L, P + L]. The image block is `1 + tokens` ids: the token
    that closes the prefix's vision start is part of the prefix, so a row starts with the image tokens and the vision
    end. sources, targets, weights: [T], for each predicted token the flat index (b * L + l) of the position that
    predicts it, the token, and its weight. owner: [T], the flat number of the segment it belongs to.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    sources: Tensor
    targets: Tensor
    weights: Tensor
    owner: Tensor


def pack(rows: list[list[Segment]], grid: int, prefix_length: int, image_id: int, end_id: int) -> Pack:
    """Lays out rows of segments about one image each; images have grid x grid tokens.

    Every segment continues right after the image (M-RoPE: `grid` positions after its start), as if it were the only
    question of its chat.
    """
    tokens = grid * grid
    head = tokens + 1
    length = max(head + sum(len(s.prompt) + len(s.answer) for s in row) for row in rows)
    batch = len(rows)
    ids = torch.zeros(batch, length, dtype=torch.long)
    positions = torch.zeros(3, batch, length, dtype=torch.long)
    mask = torch.zeros(batch, 1, length, prefix_length + length, dtype=torch.bool)
    mask[..., :prefix_length] = True
    cell = torch.arange(tokens)
    image_positions = prefix_length + torch.stack([torch.zeros_like(cell), cell // grid, cell % grid])
    sources: list[int] = []
    targets: list[int] = []
    weights: list[float] = []
    owner: list[int] = []
    number = 0
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    for b, row in enumerate(rows):
        ids[b, :tokens] = image_id
        ids[b, tokens] = end_id
        positions[:, b, :tokens] = image_positions
        positions[:, b, tokens] = prefix_length + grid
        mask[b, 0, :head, prefix_length : prefix_length + head] = causal[:head, :head]
        start = head
        for segment in row:
            both = segment.prompt + segment.answer
            stop = start + len(both)
            ids[b, start:stop] = torch.tensor(both)
            positions[:, b, start:stop] = prefix_length + grid + 1 + torch.arange(len(both))
            mask[b, 0, start:stop, prefix_length : prefix_length + head] = True
            own = causal[: len(both), : len(both)]
            mask[b, 0, start:stop, prefix_length + start : prefix_length + stop] = own
            first = b * length + start + len(segment.prompt) - 1
            sources += range(first, first + len(segment.answer))
            targets += segment.answer
            weights += segment.weights
            owner += [number] * len(segment.answer)
            number += 1
            start = stop
        # Padding rows must see something, or their softmax is not a number.
        mask[b, 0, start:, prefix_length] = True
    return Pack(
        ids,
        positions,
        mask,
        torch.tensor(sources),
        torch.tensor(targets),
        torch.tensor(weights),
        torch.tensor(owner),
    )


def answer_logits(
    lm: Language, pack: Pack, image: Tensor, image_id: int, prefix: Prefix, adapter: Adapter | None = None
) -> Tensor:
    """Logits of the answer tokens, [T, V]; image: [B, tokens, H] replaces the image ids' embeddings."""
    is_image = (pack.ids == image_id)[..., None]
    spread = torch.zeros(*pack.ids.shape, image.shape[-1])
    spread = torch.cat([image, spread[:, image.shape[1] :]], dim=1)
    embeds = torch.where(is_image, spread, lm.embed[pack.ids])
    hidden, _ = forward(lm, embeds, pack.positions, pack.mask, prefix, adapter)
    return to_words(lm, hidden.flatten(0, 1)[pack.sources])
