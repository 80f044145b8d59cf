"""The block-diffusion drafter (DFlash) in plain torch.

A block is ``[anchor, MASK x (B - 1)]``. It attends to the context (keys and values projected from the target's
hidden states at positions before the anchor) and, both ways, to itself. The output at block position d, through the
target's LM head, is a distribution over the token d steps after the anchor.

The parameter names and the arithmetic are those of SGLang's ``DFlashDraftModel``, so what is trained here is served
there. Positions are plain sequence indices, image tokens included (SGLang's drafter sees no M-RoPE).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from sglang_d3tree.train.tower import rms_norm, rotate


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes of a drafter. target_layer_ids: i means the target's residual stream after layer i."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    block_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Under autocast x may be bfloat16, the gain is not; only equal types have a fused kernel.
        return rms_norm(x.float(), self.weight, self.eps)


@dataclass(frozen=True)
class BlockContext:
    """What blocks attend to besides themselves.

    features: [S, T, H], the projected target states. cos, sin: [1, T, 1, head_dim / 2], rotary terms of positions
    0..T-1. visible: bool [S, A, T], position before the block's anchor.
    """

    features: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    visible: torch.Tensor


class Attention(nn.Module):
    """Grouped-query attention of a block over its context and itself, with normalised queries and keys."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def _keys_values(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [..., H] -> rotated keys and values, [..., kv_heads, head_dim]."""
        shape = (*x.shape[:-1], self.kv_heads, self.head_dim)
        k = rotate(self.k_norm(self.k_proj(x).view(shape)), cos, sin)
        return k, self.v_proj(x).view(shape)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, context: BlockContext) -> torch.Tensor:
        """x: [S, A, B, H] (S sequences, A blocks each); cos, sin: [S, A, B, 1, head_dim / 2]."""
        s, a, b, _ = x.shape
        g, kv, d = self.heads // self.kv_heads, self.kv_heads, self.head_dim
        t = context.features.shape[1]
        q = rotate(self.q_norm(self.q_proj(x).view(s, a, b, self.heads, d)), cos, sin)
        q = q.view(s, a, b, kv, g, d).permute(0, 3, 1, 4, 2, 5) * d**-0.5  # [S, kv, A, g, B, d]
        k_own, v_own = self._keys_values(x, cos, sin)
        k_ctx, v_ctx = self._keys_values(context.features, context.cos, context.sin)
        k_own, v_own = (y.permute(0, 3, 1, 2, 4) for y in (k_own, v_own))  # [S, kv, A, B, d]
        k_ctx, v_ctx = (y.transpose(1, 2) for y in (k_ctx, v_ctx))  # [S, kv, T, d]
        to_ctx = q.reshape(s, kv, -1, d) @ k_ctx.transpose(-1, -2)  # [S, kv, A * g * B, T]
        hidden = ~context.visible[:, None, :, None, None]  # [S, 1, A, 1, 1, T]
        to_ctx = to_ctx.view(s, kv, a, g, b, t).masked_fill(hidden, float("-inf"))
        to_own = q.reshape(s, kv, a, g * b, d) @ k_own.transpose(-1, -2)
        weights = torch.cat([to_ctx, to_own.view(s, kv, a, g, b, b)], dim=-1).softmax(dim=-1)
        out = weights[..., :t].reshape(s, kv, -1, t) @ v_ctx
        own = weights[..., t:].reshape(s, kv, a, g * b, b) @ v_own
        out = out.view(s, kv, a, g, b, d) + own.view(s, kv, a, g, b, d)
        return self.o_proj(out.permute(0, 2, 4, 1, 3, 5).reshape(s, a, b, self.heads * d))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, context: BlockContext) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, context)
        return x + self.mlp(self.post_attention_layernorm(x))


class DrafterModel(nn.Module):
    """The drafter. The embedding and the LM head are the target's and belong to the caller."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def _rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: [...] -> cos, sin: [..., 1, head_dim / 2] (the 1 stands for the heads)."""
        half = self.config.head_dim // 2
        inv_freq = self.config.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = positions[..., None, None].float() * inv_freq
        return angle.cos(), angle.sin()

    def project(self, target_hidden: torch.Tensor) -> torch.Tensor:
        """Captured target states [..., K * H] -> context features [..., H]."""
        return self.hidden_norm(self.fc(target_hidden))

    def forward(self, block_embeds: torch.Tensor, anchors: torch.Tensor, target_hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of many blocks, ready for the target's LM head.

        block_embeds: [S, A, B, H], the target's embeddings of the block inputs. anchors: [S, A], positions of the
        anchors. target_hidden: [S, T, K * H], captured states of positions 0..T-1; a block uses those before
        its anchor only. Returns [S, A, B, H].
        """
        b, t = block_embeds.shape[2], target_hidden.shape[1]
        cos, sin = self._rotary(anchors[..., None] + torch.arange(b))
        ctx_cos, ctx_sin = self._rotary(torch.arange(t)[None])
        visible = torch.arange(t) < anchors[..., None]
        context = BlockContext(self.project(target_hidden), ctx_cos, ctx_sin, visible)
        x = block_embeds
        for layer in self.layers:
            x = layer(x, cos, sin, context)
        hidden: torch.Tensor = self.norm(x)
        return hidden
