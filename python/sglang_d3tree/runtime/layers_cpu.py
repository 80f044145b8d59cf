"""SGLang's layer operations on the CPU platform: one C++ kernel each instead of a dozen torch calls.

SGLang asks ``BaseFusedOp``'s registry for the platform's own forward of an operation class. What a kernel does not
cover goes to the class's torch version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sgl_kernel_ext.dispatch import get_kernel

_rms_norm = get_kernel("rms_norm", "cpu")
_add_rms_norm = get_kernel("add_rms_norm", "cpu")
_silu_and_mul = get_kernel("silu_and_mul", "cpu")
_rotate = get_kernel("rotate", "cpu")


def register_layers(platform_key: str) -> None:
    """Make SGLang use the kernels under the platform's dispatch key."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm

    BaseFusedOp.register_oot_forward(RMSNorm, rms_norm_forward, platform_key)
    BaseFusedOp.register_oot_forward(SiluAndMul, silu_and_mul_forward, platform_key)
    for rotary in rotary_classes():
        BaseFusedOp.register_oot_forward(rotary, rotary_forward, platform_key)


def rotary_classes() -> list[type]:
    """Rotary embeddings that differ from the plain one in their table only."""
    from sglang.srt.layers.rotary_embedding import base, mrope, rope_variant, yarn

    return [
        base.RotaryEmbedding,
        base.LinearScalingRotaryEmbedding,
        mrope.MRotaryEmbedding,
        mrope.YaRNScalingMRotaryEmbedding,
        rope_variant.Llama3RotaryEmbedding,
        rope_variant.DynamicNTKScalingRotaryEmbedding,
        rope_variant.DynamicNTKAlphaRotaryEmbedding,
        yarn.YaRNScalingRotaryEmbedding,
    ]


def is_plain_norm(norm: Any) -> bool:
    """Whether the kernels compute what this RMSNorm does."""
    return (
        norm.variance_size_override is None
        and norm.override_orig_dtype is None
        and not norm.cast_x_before_out_mul
        and not norm.fp32_residual
    )


def _rows(x: torch.Tensor, dtype: torch.dtype) -> bool:
    return x.dim() == 2 and x.stride(1) == 1 and x.dtype == dtype


def rms_norm_forward(
    norm: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: torch.nn.Module | None = None,
) -> Any:
    """``RMSNorm.forward``: the normed rows, and with a residual also the new residual."""
    weight = norm.weight
    covered = (
        is_plain_norm(norm)
        and _rows(x, weight.dtype)
        and x.shape[1] == weight.shape[0]
        and post_residual_addition is None
    )
    if not covered or (residual is not None and not _rows(residual, weight.dtype)):
        return norm.forward_native(x, residual, post_residual_addition, quant_linear)
    if residual is None:
        return _rms_norm(x, weight, norm.variance_epsilon)
    return _add_rms_norm(x, residual, weight, norm.variance_epsilon)


def silu_and_mul_forward(activation: Any, x: torch.Tensor) -> torch.Tensor:
    """``SiluAndMul.forward``."""
    return _silu_and_mul(x) if x.dim() == 2 and x.stride(1) == 1 else activation.forward_native(x)


def rotary_forward(
    rotary: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``RotaryEmbedding.forward`` and ``MRotaryEmbedding.forward``, positions [T] or [3, T]."""
    extras = [extra for extra in (*args, *kwargs.values()) if extra is not None]
    if extras or not (_rows(query, query.dtype) and _rows(key, query.dtype)):
        native: Callable[..., tuple[torch.Tensor, torch.Tensor]] = rotary.forward_native
        return native(positions, query, key, *args, **kwargs)
    axes = rotary.axis_map if positions.dim() == 2 else None
    result: tuple[torch.Tensor, torch.Tensor] = _rotate(
        query, key, positions, rotary.cos_sin_cache, rotary.head_size, axes, rotary.is_neox_style
    )
    return result
