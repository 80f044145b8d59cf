"""What a transformer layer does between its matrix products, in plain torch: the specification of the fused kernels.

Everything is computed in float32 and rounded once to the type of the input. float32, bfloat16 and float16 are accepted.
"""

from __future__ import annotations

import torch

from sgl_kernel_ext.reference.kv import store_kv


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm of every row.

    Args:
        x: [T, H], rows contiguous.
        weight: [H], x's dtype.

    Returns:
        [T, H] in x's dtype.
    """
    return _norm(x.float(), weight, eps).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of ``x + residual``, and that sum.

    Args:
        x, residual: [T, H], the same dtype.
        weight: [H].

    Returns:
        Norm of the unrounded sum, and the sum, both [T, H] in x's dtype and new.
    """
    total = x.float() + residual.float()
    return _norm(total, weight, eps).to(x.dtype), total.to(x.dtype)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` for rows that hold gate and up side by side.

    Args:
        x: [T, 2 * D].

    Returns:
        [T, D] in x's dtype.
    """
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    head_dim: int,
    axes: torch.Tensor | None,
    neox: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding of queries and keys, with one position per row or one per axis (M-RoPE).

    Args:
        q, k: [T, heads * head_dim].
        positions: [T] or [3, T] integers below P.
        cos_sin: [P, R] cosines of R / 2 angles, then their sines; R <= head_dim values of each head are rotated.
        axes: [R / 2] integers in 0..2, the axis whose position turns each pair; needed for positions [3, T].
        neox: pairs are values i and i + R / 2 of a head (True) or 2 i and 2 i + 1 (False).

    Returns:
        The rotated q and k, new tensors.

    Raises:
        IndexError: a position outside the table.
    """
    half = cos_sin.shape[1] // 2
    angles = cos_sin.float()[positions]
    if positions.dim() == 2:
        assert axes is not None
        pair = torch.arange(half, device=cos_sin.device)
        cos, sin = angles[axes, :, pair].T, angles[axes, :, half + pair].T
    else:
        cos, sin = angles.split(half, dim=-1)
    return _rotate_heads(q, head_dim, cos, sin, neox), _rotate_heads(k, head_dim, cos, sin, neox)


def _rotate_heads(x: torch.Tensor, head_dim: int, cos: torch.Tensor, sin: torch.Tensor, neox: bool) -> torch.Tensor:
    heads = x.unflatten(-1, (x.shape[1] // head_dim, head_dim)).float()
    rotated, rest = heads.split((2 * cos.shape[1], head_dim - 2 * cos.shape[1]), dim=-1)
    pairs = rotated.unflatten(-1, (2, -1)) if neox else rotated.unflatten(-1, (-1, 2)).transpose(-1, -2)
    first, second = pairs.unbind(-2)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-2)
    turned = turned if neox else turned.transpose(-1, -2)
    return torch.cat((turned.flatten(-2), rest), dim=-1).to(x.dtype).flatten(1)


def rotate_and_store(
    qkv: torch.Tensor,
    q_heads: int,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    axes: torch.Tensor | None,
    neox: bool,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """From the qkv projection to what attention reads: norms of heads (if any), rotation, K and V into the cache.

    Args:
        qkv: [T, (Hq + Hkv) * Dh + Hkv * Dv].
        q_heads: Hq.
        positions, cos_sin, axes, neox: as in `rotate`.
        k_cache, v_cache: [S, Hkv, Dh] and [S, Hkv, Dv], qkv's dtype; written in place.
        slots: [T] int64; what a slot named twice holds is not specified.
        q_norm, k_norm: [Dh] weights of the norm that each head goes through first, or None.
        eps: of those norms.

    Returns:
        Rotated queries [T, Hq, Dh].

    Raises:
        IndexError: a position outside the table or a slot outside the cache.
    """
    rows, kv_heads, head_dim = qkv.shape[0], k_cache.shape[1], k_cache.shape[2]
    q, k, v = qkv.split((q_heads * head_dim, kv_heads * head_dim, kv_heads * v_cache.shape[2]), dim=-1)
    if q_norm is not None:
        q = rms_norm(q.reshape(-1, head_dim), q_norm, eps).view_as(q)
    if k_norm is not None:
        k = rms_norm(k.reshape(-1, head_dim), k_norm, eps).view_as(k)
    q, k = rotate(q, k, positions, cos_sin, head_dim, axes, neox)
    store_kv(k.view(rows, kv_heads, head_dim), v.unflatten(-1, v_cache.shape[1:]), k_cache, v_cache, slots)
    return q.view(rows, q_heads, head_dim)
