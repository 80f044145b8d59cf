"""The block-diffusion drafter (DFlash) in plain torch: model, objective, training loop, checkpoint format.

A block is ``[anchor, MASK x (B - 1)]``. It attends to the context (keys and values projected from the target's
hidden states at positions before the anchor) and, both ways, to itself. The output at block position d, through the
target's LM head, is a distribution over the token d steps after the anchor.

The parameter names and the arithmetic are those of SGLang's ``DFlashDraftModel``, so what is saved here is served
there. Positions are plain sequence indices, image tokens included (SGLang's drafter sees no M-RoPE).
"""

from __future__ import annotations

import argparse
import copy
import heapq
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from ..demo.target import CONTEXT_LENGTH, MASK_TOKEN_ID, atomic_directory
from .data import (
    Conversation,
    default_capture_layers,
    load_shard,
    read_dims,
    read_options,
    rms_norm,
    rotate,
    shard_paths,
)

log = logging.getLogger(__name__)


# ---------------------------------------------------------------- model


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
        return rms_norm(x, self.weight, self.eps)


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


# ---------------------------------------------------------------- initial weights


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
    mask_token_id: int = MASK_TOKEN_ID,
) -> DrafterConfig:
    """A drafter that fits the target: same width, heads and rotary base."""
    dims = read_dims(target_dir)
    text = json.loads((target_dir / "config.json").read_text())["text_config"]
    return DrafterConfig(
        hidden_size=dims.hidden_size,
        intermediate_size=intermediate_size or text["intermediate_size"],
        num_layers=layers,
        num_heads=dims.num_heads,
        num_kv_heads=dims.num_kv_heads,
        head_dim=dims.head_dim,
        vocab_size=dims.vocab_size,
        rms_norm_eps=dims.rms_norm_eps,
        rope_theta=dims.rope_theta,
        block_size=block_size,
        num_target_layers=dims.num_layers,
        target_layer_ids=tuple(target_layer_ids or default_capture_layers(dims.num_layers)),
        mask_token_id=mask_token_id,
    )


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


# ---------------------------------------------------------------- checkpoint format


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


# ---------------------------------------------------------------- objective


@dataclass(frozen=True)
class BlockBatch:
    """Blocks of a few conversations.

    block_ids: [S, A, B], anchor and masks. anchors: [S, A]. labels: [S, A, B - 1], the target's own next tokens, -1
    beyond the answer's end. target_hidden: [S, T, K * H] float32, zero padded.
    """

    block_ids: torch.Tensor
    anchors: torch.Tensor
    labels: torch.Tensor
    target_hidden: torch.Tensor


def make_blocks(
    conversations: Sequence[Conversation], anchors: torch.Tensor, block_size: int, mask_token_id: int
) -> BlockBatch:
    """Blocks at the given anchor positions. anchors: [S, A], indices into each conversation's tokens."""
    length = int(anchors.max())  # states at or after the last anchor are never visible
    tokens = torch.full((len(conversations), length + block_size), -1)
    width = conversations[0].hidden.shape[1]
    hidden = torch.zeros(len(conversations), length, width)
    for i, c in enumerate(conversations):
        tokens[i, : len(c.tokens)] = torch.tensor(c.tokens)[: length + block_size]
        n = min(length, len(c.tokens))
        hidden[i, :n] = c.hidden[:n].float()
    index = anchors[..., None] + torch.arange(block_size)
    path = tokens.gather(1, index.flatten(1)).view(index.shape)
    block_ids = torch.full_like(path, mask_token_id)
    block_ids[..., 0] = path[..., 0]
    return BlockBatch(block_ids, anchors, path[..., 1:], hidden)


def anchor_range(c: Conversation) -> range:
    """Positions that can be anchors: every answer token that has a successor in the answer."""
    return range(c.prompt_length, len(c.tokens) - 1)


class ReducedHead:
    """A softmax over the tokens that matter, instead of all 49k.

    The frequent tokens of the data and the batch's own labels take part exactly; a uniform random sample stands in
    for the rest, its logits raised by log(rest / sample), so the partition function keeps its expectation and
    unseen tokens are still pushed down.
    """

    def __init__(self, head: torch.Tensor, frequent: torch.Tensor, sample: int) -> None:
        self.head, self.frequent = head, frequent
        self.rows = head[frequent]
        self.lookup = torch.full((head.shape[0],), -1)
        self.lookup[frequent] = torch.arange(len(frequent))
        self.others = (self.lookup < 0).nonzero().squeeze(1)
        self.sample = min(sample, len(self.others))

    def cross_entropy(self, hidden: torch.Tensor, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """hidden: [N, H], labels: [N] -> losses [N]."""
        slot = self.lookup[labels]
        rare, inverse = labels[slot < 0].unique(return_inverse=True)
        slot = slot.clone()
        slot[slot < 0] = len(self.frequent) + inverse
        rows, shift = [self.rows, self.head[rare]], torch.zeros(len(self.frequent) + len(rare))
        if self.sample:
            pick = self.others[torch.randint(len(self.others), (self.sample,), generator=generator)]
            rows.append(self.head[pick])
            shift = torch.cat([shift, torch.full((self.sample,), math.log(len(self.others) / self.sample))])
        logits = F.linear(hidden, torch.cat(rows)) + shift
        return F.cross_entropy(logits, slot, reduction="none")


def block_loss(
    model: DrafterModel,
    embedding: torch.Tensor,
    head: ReducedHead,
    batch: BlockBatch,
    gamma: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """Cross-entropy on the target's own continuation, weight exp(-(d - 1) / gamma) at depth d.

    Early positions count more: a wrong token ends the accepted path, whatever follows it.
    """
    hidden = model(embedding[batch.block_ids], batch.anchors, batch.target_hidden)[..., 1:, :]
    valid = batch.labels >= 0
    weight = torch.exp(-torch.arange(batch.labels.shape[-1]) / gamma).expand(valid.shape)[valid]
    losses = head.cross_entropy(hidden[valid], batch.labels[valid], generator)
    return (losses * weight).sum() / weight.sum()


# ---------------------------------------------------------------- validation


def tree_accept_length(log_probs: list[list[float]], ids: list[list[int]], truth: list[int], nodes: int) -> int:
    """Tokens emitted in a round whose tree holds the ``nodes`` best paths of the marginals (bonus included).

    log_probs, ids: [depths][candidates], best first. truth: the target's next tokens.
    """
    heap = [(-log_probs[0][0], 0, 0, True)]  # (-path score, depth, rank, every ancestor is right)
    accepted = 0
    for _ in range(nodes):
        if not heap:
            break
        score, depth, rank, right = heapq.heappop(heap)
        parent = score + log_probs[depth][rank]
        if rank + 1 < len(ids[depth]):
            heapq.heappush(heap, (parent - log_probs[depth][rank + 1], depth, rank + 1, right))
        hit = right and ids[depth][rank] == truth[depth]
        if hit:
            accepted = max(accepted, depth + 1)
        if depth + 1 < len(ids):
            heapq.heappush(heap, (score - log_probs[depth + 1][0], depth + 1, 0, hit))
    return accepted + 1


@torch.no_grad()
def _round_lengths(
    model: DrafterModel, ends: TargetEnds, batch: BlockBatch, nodes: int
) -> tuple[list[list[int]], list[list[int]], torch.Tensor]:
    """Per block of one batch: accept length as chain and as tree [S][A], and top-1 hits [S, A, B - 1]."""
    hidden = model(ends.embedding[batch.block_ids], batch.anchors, batch.target_hidden)[..., 1:, :]
    chain, tree, hits = [], [], []
    for i in range(hidden.shape[0]):
        scores = F.linear(hidden[i], ends.head)
        best = scores.topk(min(nodes, scores.shape[-1]), dim=-1)
        log_probs = (best.values - scores.logsumexp(dim=-1, keepdim=True)).tolist()
        ids, truth = best.indices.tolist(), batch.labels[i].tolist()
        hit = best.indices[..., 0] == batch.labels[i]
        hits.append(hit)
        chain.append((hit.long().cumprod(dim=-1).sum(dim=-1) + 1).tolist())
        tree.append([tree_accept_length(p, c, t, nodes) for p, c, t in zip(log_probs, ids, truth, strict=True)])
    return chain, tree, torch.stack(hits)


@dataclass(frozen=True)
class Validation:
    """Accept lengths (tokens per round, bonus included) on held-out conversations. top1: hit rate per depth."""

    blocks: int
    chain: float
    tree: float
    top1: list[float]


def evaluate(
    model: DrafterModel,
    ends: TargetEnds,
    conversations: Sequence[Conversation],
    *,
    blocks: int = 256,
    per_conversation: int = 4,
    nodes: int = 31,
    seed: int = 0,
) -> Validation:
    """Blocks at random anchors: cheap, for the training curve. Random anchors overrate a drafter a little."""
    rng = torch.Generator().manual_seed(seed)
    b = model.config.block_size
    usable = [c for c in conversations if len(anchor_range(c)) >= b + per_conversation]
    chain: list[int] = []
    tree: list[int] = []
    hits = []
    while len(chain) < blocks and usable:
        rows = [usable[int(torch.randint(len(usable), (), generator=rng))] for _ in range(4)]
        spans = [anchor_range(c) for c in rows]
        anchors = torch.stack(
            [r.start + torch.randint(len(r) - b + 1, (per_conversation,), generator=rng) for r in spans]
        )
        batch = make_blocks(rows, anchors, b, model.config.mask_token_id)
        c_len, t_len, hit = _round_lengths(model, ends, batch, nodes)
        chain += itertools.chain.from_iterable(c_len)
        tree += itertools.chain.from_iterable(t_len)
        hits.append(hit.flatten(0, 1))
    if not chain:
        raise ValueError("no held-out conversation is long enough for validation")
    top1 = torch.cat(hits).float().mean(dim=0).tolist()
    return Validation(len(chain), sum(chain) / len(chain), sum(tree) / len(tree), [round(x, 3) for x in top1])


def walk(
    model: DrafterModel, ends: TargetEnds, conversations: Sequence[Conversation], *, nodes: int = 31
) -> dict[str, Any]:
    """Replay whole answers round by round, as serving does: each round starts where the last one stopped.

    Returns rounds, emitted tokens and accept lengths, overall and per prompt kind.
    """
    emitted: dict[str, dict[str, list[int]]] = {}
    for c in conversations:
        span = anchor_range(c)
        if not len(span):
            continue
        batch = make_blocks([c], torch.tensor([list(span)]), model.config.block_size, model.config.mask_token_id)
        chain, tree, _ = _round_lengths(model, ends, batch, nodes)
        for name, lengths in (("chain", chain[0]), ("tree", tree[0])):
            at = 0
            while at < len(span):
                step = min(lengths[at], len(span) - at)
                emitted.setdefault(c.kind, {}).setdefault(name, []).append(step)
                at += step
    report: dict[str, Any] = {}
    for name in ("chain", "tree"):
        steps = [s for kind in emitted.values() for s in kind[name]]
        report[name] = sum(steps) / len(steps)
        report[f"{name}_rounds"] = len(steps)
        report[f"{name}_by_kind"] = {k: round(sum(v[name]) / len(v[name]), 3) for k, v in sorted(emitted.items())}
    return report


# ---------------------------------------------------------------- training


@dataclass(frozen=True)
class TrainOptions:
    """Everything the run depends on besides data and target.

    steps: 0 trains for ``minutes`` of wall time instead (the schedule follows whichever is given).
    rows: block positions per step. short_share: share of the run that trains half-length blocks, which are
    cheaper and carry the early depths that matter most.
    """

    seed: int = 0
    layers: int = 2
    block_size: int = 8
    warm: bool = True
    steps: int = 0
    minutes: float = 60.0
    conversations: int = 6
    rows: int = 1152
    short_share: float = 0.3
    varied_share: float = 0.25
    lr: float = 6e-4
    min_lr: float = 3e-5
    warmup_steps: int = 30
    weight_decay: float = 0.05
    clip: float = 1.0
    gamma: float = 4.0
    ema: float = 0.99
    head_frequent: int = 4096
    head_sample: int = 512


def draw_block_size(options: TrainOptions, progress: float, generator: torch.Generator) -> int:
    """Block length of one step: short at first, then the full one, with some others mixed in.

    Serving may draft fewer positions than the training size (load) or a few more (BlockPilot's B + 2).
    """
    if progress < options.short_share:
        return max(2, options.block_size // 2)
    if float(torch.rand((), generator=generator)) < options.varied_share:
        return int(torch.randint(max(2, options.block_size // 2), options.block_size + 3, (), generator=generator))
    return options.block_size


def draw_batch(
    conversations: Sequence[Conversation],
    config: DrafterConfig,
    options: TrainOptions,
    block_size: int,
    rng: torch.Generator,
) -> BlockBatch:
    """Random conversations (by answer length) and random anchors in each."""
    sizes = torch.tensor([len(anchor_range(c)) for c in conversations], dtype=torch.float32)
    picks = torch.multinomial(sizes, options.conversations, replacement=True, generator=rng)
    rows = [conversations[i] for i in picks.tolist()]
    per_row = max(1, options.rows // block_size // len(rows))
    anchors = []
    for c in rows:
        span = anchor_range(c)
        order = torch.randperm(len(span), generator=rng)
        anchors.append(span.start + order[torch.arange(per_row) % len(span)])
    return make_blocks(rows, torch.stack(anchors), block_size, config.mask_token_id)


def frequent_tokens(conversations: Sequence[Conversation], count: int, vocab_size: int) -> torch.Tensor:
    """The most frequent tokens of the answers, most frequent first."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for c in conversations:
        counts += torch.bincount(torch.tensor(c.tokens[c.prompt_length :]), minlength=vocab_size)
    order = counts.argsort(descending=True, stable=True)[:count]
    return order[counts[order] > 0]


def load_conversations(data_dirs: Sequence[Path]) -> tuple[list[Conversation], list[Conversation]]:
    """(training, held-out) conversations of all complete shards, in order."""
    train: list[Conversation] = []
    held_out: list[Conversation] = []
    for data_dir in data_dirs:
        for path in shard_paths(data_dir):
            for c in load_shard(path):
                if len(anchor_range(c)):
                    (held_out if c.held_out else train).append(c)
    return train, held_out


class Trainer:
    """Model, average, optimiser and progress of one run; saved and restored as a whole."""

    def __init__(
        self, target_dir: Path, data_dirs: Sequence[Path], options: TrainOptions, rank: int = 0, world: int = 1
    ) -> None:
        self.options, self.data_dirs = options, list(data_dirs)
        self.rank, self.world = rank, world
        self.ends = load_target_ends(target_dir)
        capture = read_options(self.data_dirs[0]).capture
        config = drafter_config(
            target_dir, layers=options.layers, block_size=options.block_size, target_layer_ids=capture
        )
        self.model = new_drafter(config, options.seed)
        if options.warm:
            warm_start(self.model, self.ends)
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.98))
        self.step, self.seconds = 0, 0.0
        self.refresh_data()

    def refresh_data(self) -> None:
        """Read the shards that exist now (generation may still be running beside the training)."""
        self.train_set, self.held_out = load_conversations(self.data_dirs)
        if not self.train_set:
            raise FileNotFoundError(f"no training shards in {', '.join(map(str, self.data_dirs))}")
        frequent = frequent_tokens(self.train_set, self.options.head_frequent, self.ends.head.shape[0])
        self.head = ReducedHead(self.ends.head, frequent, self.options.head_sample)

    @property
    def progress(self) -> float:
        """Share of the run that is done, 0..1."""
        o = self.options
        return self.step / o.steps if o.steps else self.seconds / (60 * o.minutes)

    def learning_rate(self) -> float:
        """Linear warm-up, then cosine down to ``min_lr``."""
        o = self.options
        if self.step < o.warmup_steps:
            return o.lr * (self.step + 1) / o.warmup_steps
        return o.min_lr + (o.lr - o.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, self.progress)))

    def train_step(self) -> float:
        """One update; returns the loss. The batch depends on (seed, step, rank) alone, so resuming repeats nothing."""
        o, began = self.options, time.monotonic()
        rng = torch.Generator().manual_seed((o.seed * 1_000_003 + self.step) * self.world + self.rank)
        block_size = draw_block_size(o, self.progress, rng)
        batch = draw_batch(self.train_set, self.model.config, o, block_size, rng)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        loss = block_loss(self.model, self.ends.embedding, self.head, batch, o.gamma, rng)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        seconds = self._share_gradients(time.monotonic() - began)
        nn.utils.clip_grad_norm_(self.model.parameters(), o.clip)
        self.optimizer.step()
        self.step += 1
        decay = min(o.ema, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            for mean, p in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(p, 1 - decay)
        self.seconds += seconds
        return float(loss.detach())

    def _share_gradients(self, seconds: float) -> float:
        """Average the gradients over the processes; returns the step's time, the same number in each of them.

        Schedule, validation and saving follow that time, so all processes take the same turns.
        """
        if self.world == 1:
            return seconds
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in grads] + [torch.tensor([seconds])])
        torch.distributed.all_reduce(flat)
        flat /= self.world
        for g, mean in zip(grads, flat.split([g.numel() for g in grads] + [1]), strict=False):
            g.copy_(mean.view_as(g))
        return float(flat[-1])

    def save(self, path: Path) -> None:
        """Write the run's state atomically."""
        state = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "options": asdict(self.options),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, path)

    def restore(self, path: Path) -> None:
        """Continue a saved run; its schedule may be extended, its shape may not change."""
        state = torch.load(path, weights_only=True)
        for key in ("layers", "block_size", "seed"):
            if state["options"][key] != getattr(self.options, key):
                raise ValueError(f"{path} was trained with another {key}")
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]


def train(
    target_dir: Path,
    data_dirs: Sequence[Path],
    run_dir: Path,
    options: TrainOptions,
    *,
    export_dir: Path | None = None,
    export_above: float = 1.6,
    validate_every: float = 300.0,
    save_every: float = 240.0,
    resume: bool = True,
) -> Iterator[dict[str, Any]]:
    """Train and yield a record per validation (first process only); the run's state lives in ``run_dir``.

    export_dir: receives the averaged weights whenever validation improves beyond ``export_above``. Intervals are
    seconds of training time. Under torchrun every process trains on its own blocks and gradients are averaged.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    trainer = Trainer(target_dir, data_dirs, options, rank, world)
    state_path, curve = run_dir / "state.pt", run_dir / "curve.jsonl"
    if resume and state_path.exists():
        trainer.restore(state_path)
        log.info("continuing at step %d (%.0f s of training)", trainer.step, trainer.seconds)
    run_dir.mkdir(parents=True, exist_ok=True)
    validated = saved = trainer.seconds
    best, losses = export_above, []
    while trainer.progress < 1:
        losses.append(trainer.train_step())
        done = trainer.progress >= 1
        if trainer.seconds - saved > save_every or done:
            saved = trainer.seconds
            if rank == 0:
                trainer.save(state_path)
        if trainer.step % 20 == 0 and rank == 0:
            recent = sum(losses[-20:]) / len(losses[-20:])
            log.info(
                "step %d  %.1f%%  loss %.3f  lr %.1e  %.2f s/step",
                trainer.step, 100 * trainer.progress, recent, trainer.learning_rate(), trainer.seconds / trainer.step,
            )  # fmt: skip
        if trainer.seconds - validated > validate_every or done:
            validated = trainer.seconds
            trainer.refresh_data()
            if rank:
                continue
            result = evaluate(trainer.average, trainer.ends, trainer.held_out)
            record = {
                "step": trainer.step,
                "minutes": round(trainer.seconds / 60, 1),
                "loss": round(sum(losses) / len(losses), 4),
                "conversations": len(trainer.train_set),
                **asdict(result),
            }
            losses = []
            with curve.open("a") as handle:
                handle.write(json.dumps(record) + "\n")
            if result.tree > best and export_dir is not None:
                best = result.tree
                save_dflash_checkpoint(trainer.average, export_dir)
                record["exported"] = str(export_dir)
            yield record


# ---------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``d3tree train drafter``."""
    o = TrainOptions()
    parser.add_argument("--target", type=Path, default=Path(".cache/d3tree/target"), help="target checkpoint")
    parser.add_argument(
        "--data", type=Path, nargs="+", default=[Path(".cache/d3tree/data/text")], help="shard directories"
    )
    parser.add_argument("--run-dir", type=Path, default=Path(".cache/d3tree/train"), help="state and curve")
    parser.add_argument("--out", type=Path, default=Path(".cache/d3tree/drafter"), help="final checkpoint")
    parser.add_argument("--wip", type=Path, default=None, help="checkpoint updated whenever validation improves")
    parser.add_argument("--minutes", type=float, default=o.minutes, help="training time (with --steps 0)")
    parser.add_argument("--steps", type=int, default=o.steps, help="training steps (0: by time)")
    parser.add_argument("--seed", type=int, default=o.seed)
    parser.add_argument("--layers", type=int, default=o.layers)
    parser.add_argument("--block-size", type=int, default=o.block_size)
    parser.add_argument("--lr", type=float, default=o.lr)
    parser.add_argument("--rows", type=int, default=o.rows, help="block positions per step")
    parser.add_argument("--short-share", type=float, default=o.short_share, help="share of half-length blocks")
    parser.add_argument("--random-init", action="store_true", help="do not start from the target's last layers")
    parser.add_argument("--no-resume", action="store_true", help="ignore an earlier state in the run directory")
    parser.add_argument("--validate-every", type=float, default=300.0, help="seconds between validations")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's own choice)")


def run(args: argparse.Namespace) -> int:
    """Train (or continue), then write the averaged weights."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    if args.threads:
        torch.set_num_threads(args.threads)
    options = TrainOptions(
        seed=args.seed,
        layers=args.layers,
        block_size=args.block_size,
        warm=not args.random_init,
        steps=args.steps,
        minutes=args.minutes,
        lr=args.lr,
        rows=args.rows,
        short_share=args.short_share,
    )
    records = train(
        args.target,
        args.data,
        args.run_dir,
        options,
        export_dir=args.wip,
        validate_every=args.validate_every,
        resume=not args.no_resume,
    )
    for record in records:
        log.info("validation %s", json.dumps(record))
    if int(os.environ.get("RANK", 0)):
        return 0
    return export(args.target, args.data, args.run_dir, args.out, options)


def export(target: Path, data: Sequence[Path], run_dir: Path, out: Path, options: TrainOptions) -> int:
    """Write the averaged weights of a run's last state and replay the held-out answers with them."""
    trainer = Trainer(target, data, options)
    trainer.restore(run_dir / "state.pt")
    save_dflash_checkpoint(trainer.average, out)
    report = walk(load_dflash_checkpoint(out), trainer.ends, trainer.held_out[:40])
    log.info("replay of held-out answers %s", json.dumps(report))
    (run_dir / "final.json").write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(_parser)
    raise SystemExit(run(_parser.parse_args()))
