"""The target's language tower in plain torch, for generating training data on a CPU.

It reads the tensors of a Qwen2.5-VL checkpoint. Serving never uses it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file


@dataclass(frozen=True)
class TowerDims:
    """What the forward pass has to know, read from the checkpoint's config.json."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    rope_theta: float
    rms_norm_eps: float
    mrope_section: tuple[int, ...]

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def read_dims(target_dir: Path) -> TowerDims:
    """Language-tower sizes of a Qwen2.5-VL checkpoint."""
    config = json.loads((target_dir / "config.json").read_text())
    text = config.get("text_config", config)
    rope = text["rope_parameters"]
    return TowerDims(
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        num_layers=text["num_hidden_layers"],
        num_heads=text["num_attention_heads"],
        num_kv_heads=text["num_key_value_heads"],
        rope_theta=rope["rope_theta"],
        rms_norm_eps=text["rms_norm_eps"],
        mrope_section=tuple(rope["mrope_section"]),
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in the half-split (neox) layout. x: [..., D]; cos, sin: broadcast to [..., D / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _times(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """x [..., in] float32 times matrix [in, out] of any dtype, in float32."""
    return (x.to(matrix.dtype) @ matrix).float()


@dataclass
class KVCache:
    """Keys and values of a fixed number of slots. k, v: [layers, slots, kv_heads, capacity, head_dim]."""

    k: torch.Tensor
    v: torch.Tensor


class LanguageTower:
    """The target's language tower in plain torch, for batched generation on a CPU.

    Residual stream, norms, attention and cache are float32; the matrices may be bfloat16, which CPUs with bfloat16
    dot products multiply twice as fast.

    transformers' own generate pads the whole batch and stops only when its slowest row ends. Here a finished
    slot takes the next prompt at once, and the layers' outputs are handed out without a second pass.
    """

    def __init__(self, target_dir: Path, capture: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> None:
        """dtype: of the matrices, float32 or bfloat16."""
        self.dims = read_dims(target_dir)
        self.capture = tuple(capture)
        raw = load_file(target_dir / "model.safetensors")
        weights = {k.removeprefix("model."): v.float() for k, v in raw.items() if not k.startswith("visual.")}
        self.embedding = weights["embed_tokens.weight"]
        self.head = weights.get("lm_head.weight", self.embedding).to(dtype)
        self.norm = weights["norm.weight"]
        self.layers = [self._layer(weights, i, dtype) for i in range(self.dims.num_layers)]
        half = self.dims.head_dim // 2
        self.inv_freq = self.dims.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
        # Which of the three M-RoPE coordinates (time, height, width) each rotary pair follows.
        self.section = torch.repeat_interleave(torch.arange(3), torch.tensor(self.dims.mrope_section))

    @staticmethod
    def _layer(weights: dict[str, torch.Tensor], index: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        prefix = f"layers.{index}."
        own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        qkv = [own[f"self_attn.{p}_proj.weight"] for p in "qkv"]
        bias = [own[f"self_attn.{p}_proj.bias"] for p in "qkv"]
        return {
            "input_norm": own["input_layernorm.weight"],
            "post_norm": own["post_attention_layernorm.weight"],
            # Matrices are kept [in, out]: at a hundred rows, MKL multiplies by them about twice as fast as by
            # Linear's [out, in] layout, which it repacks on every call.
            "qkv": torch.cat(qkv).t().to(dtype).contiguous(),
            "qkv_bias": torch.cat(bias),
            "o": own["self_attn.o_proj.weight"].t().to(dtype).contiguous(),
            "gate": own["mlp.gate_proj.weight"].t().to(dtype).contiguous(),
            "up": own["mlp.up_proj.weight"].t().to(dtype).contiguous(),
            "down": own["mlp.down_proj.weight"].t().to(dtype).contiguous(),
        }

    def new_cache(self, slots: int, capacity: int) -> KVCache:
        """An empty cache of float32 keys and values."""
        d = self.dims
        shape = (d.num_layers, slots, d.num_kv_heads, capacity, d.head_dim)
        return KVCache(torch.zeros(shape), torch.zeros(shape))

    def forward(
        self,
        embeds: torch.Tensor,
        start: torch.Tensor,
        cache: KVCache,
        slots: slice | torch.Tensor,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run T new tokens of b slots and append them to the cache.

        embeds: [b, T, H]. start: [b], each row's cached length. positions: [3, b, T] M-RoPE coordinates, by
        default start + 0..T-1 in all three (text). Tokens beyond a row's real length may be padding: what they
        write is overwritten before any later query can see it.
        Returns the last layer's output before the final norm, [b, T, H], and the captured layers' outputs side
        by side, [b, T, len(capture) * H].
        """
        d = self.dims
        b, t, _ = embeds.shape
        index = start[:, None] + torch.arange(t)
        coordinates = index.expand(3, b, t) if positions is None else positions
        angle = coordinates[self.section].permute(1, 2, 0).float() * self.inv_freq
        cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
        length = int(index.max()) + 1
        visible = torch.arange(length) <= index[:, :, None]  # [b, T, length]
        mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
        # Query heads of one KV head are laid out as extra query rows, so K and V are never repeated.
        group = d.num_heads // d.num_kv_heads
        mask = mask[:, None, None].expand(b, 1, group, t, length).reshape(b, 1, group * t, length)
        rows = (torch.arange(cache.k.shape[1])[slots] if isinstance(slots, slice) else slots)[:, None]

        hidden, captured = embeds, []
        for i, w in enumerate(self.layers):
            x = rms_norm(hidden, w["input_norm"], d.rms_norm_eps)
            qkv = (_times(x, w["qkv"]) + w["qkv_bias"]).view(b, t, -1, d.head_dim)
            q, k, v = qkv.split([d.num_heads, d.num_kv_heads, d.num_kv_heads], dim=2)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            cache.k[i][rows, :, index] = k
            cache.v[i][rows, :, index] = v
            # A view for slices, a copy for index tensors.
            k_all, v_all = cache.k[i][:, :, :length][slots], cache.v[i][:, :, :length][slots]
            q = q.view(b, t, d.num_kv_heads, group, d.head_dim).permute(0, 2, 3, 1, 4)
            q = q.reshape(b, d.num_kv_heads, group * t, d.head_dim)
            out = F.scaled_dot_product_attention(q, k_all, v_all, attn_mask=mask)
            out = out.view(b, d.num_kv_heads, group, t, d.head_dim).permute(0, 3, 1, 2, 4)
            hidden = hidden + _times(out.reshape(b, t, -1), w["o"])
            x = rms_norm(hidden, w["post_norm"], d.rms_norm_eps)
            hidden = hidden + _times(F.silu(_times(x, w["gate"])) * _times(x, w["up"]), w["down"])
            if i in self.capture:
                captured.append(hidden)
        return hidden, torch.cat(captured, dim=-1) if captured else hidden[..., :0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (before the final norm): [..., H] -> [..., V]."""
        normed = rms_norm(hidden, self.norm, self.dims.rms_norm_eps)
        return F.linear(normed.to(self.head.dtype), self.head).float()


def default_capture_layers(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """``count`` layers from the second to the third last, evenly spread: DFlash's own choice.

    A tiny target gets fewer. Layer i means the residual stream *after* layer i, as SGLang reads ``target_layer_ids``.
    """
    if count == 1:
        return (num_layers // 2,)
    # The output of the very last layer cannot be captured (SGLang reads layer i's output as layer i + 1's input).
    first, last = (1, num_layers - 3) if num_layers >= 6 else (0, num_layers - 2)
    return tuple(sorted({round(first + i * (last - first) / (count - 1)) for i in range(count)}))
