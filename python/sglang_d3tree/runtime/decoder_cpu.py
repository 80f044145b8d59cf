"""The decoder stack of common families on the CPU platform: SGLang's modules and weights, one short loop.

With small models SGLang's general layer code (stage boundaries, communication, dispatch) takes longer than the
arithmetic between the matrix products. ``install`` replaces the stack's ``forward`` where it is exactly this loop:
one device, no adapters, attention through ``D3TreeCpuAttnBackend``. Everything else keeps SGLang's forward.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.aux_hidden_states import AuxHiddenStateList
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.runtime_context import get_exec, get_lora, get_parallel

from sgl_kernel_ext.dispatch import get_kernel
from sglang_d3tree.runtime.attention_cpu import D3TreeCpuAttnBackend
from sglang_d3tree.runtime.layers_cpu import is_plain_norm, rotary_classes

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

logger = logging.getLogger(__name__)

_rms_norm = get_kernel("rms_norm", "cpu")
_add_rms_norm = get_kernel("add_rms_norm", "cpu")
_silu_and_mul = get_kernel("silu_and_mul", "cpu")
_rotate_and_store = get_kernel("rotate_and_store", "cpu")

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: the modules that hold its weights, and its matrix products."""

    input_norm: RMSNorm
    qkv: Product
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    head_norm_eps: float
    attention: Any
    out: Product
    post_norm: RMSNorm
    gate_up: Product
    down: Product


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder stack: SGLang's model, its own forward, its layers, the rotary embedding that they share."""

    model: Any
    stock_forward: Callable[..., Any]
    layers: tuple[Layer, ...]
    rotary: Any


def install(model: torch.nn.Module) -> None:
    """Give every stack inside a loaded model that this loop covers the loop as its forward."""
    if get_parallel().tp_size > 1 or get_parallel().pp_size > 1 or get_lora().enable_lora:
        return
    if get_exec().deterministic.rl_on_policy_target is not None:
        return
    known = _stack_classes()
    for module in model.modules():
        if type(module) not in known:
            continue
        decoder = _take_apart(module, known[type(module)])
        if decoder is not None:
            module.forward = functools.partial(forward, decoder)  # type: ignore[method-assign]
            logger.info("%s runs its %d layers in the CPU platform's loop.", type(module).__name__, len(decoder.layers))


def forward(
    decoder: Decoder,
    input_ids: torch.Tensor | None,
    positions: torch.Tensor,
    forward_batch: ForwardBatch,
    input_embeds: torch.Tensor | None = None,
    pp_proxy_tensors: Any = None,
) -> Any:
    """What SGLang's own forward returns: final hidden states [T, H], with captured ones if any were asked for."""
    model = decoder.model
    backend = get_attn_backend()
    if not _covers(backend, forward_batch) or pp_proxy_tensors is not None:
        return decoder.stock_forward(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
    hidden = model.embed_tokens(input_ids) if input_embeds is None else input_embeds

    captured = AuxHiddenStateList()
    residual: torch.Tensor | None = None
    slots, rotary = forward_batch.out_cache_loc, decoder.rotary
    table, neox, axes = rotary.cos_sin_cache, rotary.is_neox_style, rotary.axis_map if positions.dim() == 2 else None
    for index, layer in enumerate(decoder.layers):
        normed, residual = _norm(layer.input_norm, hidden, residual)
        if index in model.layers_to_capture:
            captured.append(residual)
        keys, values = backend.kv_buffers(layer.attention)
        q = _rotate_and_store(
            layer.qkv(normed), layer.attention.tp_q_head_num, positions, table, axes, neox, keys, values, slots,
            layer.q_norm, layer.k_norm, layer.head_norm_eps,
        )  # fmt: skip
        hidden = layer.out(backend.attend(layer.attention, q))
        normed, residual = _norm(layer.post_norm, hidden, residual)
        hidden = layer.down(_silu_and_mul(layer.gate_up(normed)))
    hidden, _ = _norm(model.norm, hidden, residual)
    return (hidden, captured) if captured else hidden


def _norm(
    norm: RMSNorm, hidden: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if residual is None:
        return _rms_norm(hidden, norm.weight, norm.variance_epsilon), hidden
    normed, total = _add_rms_norm(hidden, residual, norm.weight, norm.variance_epsilon)
    return normed, total


def _covers(backend: AttentionBackend, forward_batch: ForwardBatch) -> bool:
    return (
        isinstance(backend, D3TreeCpuAttnBackend)
        and backend.has_plain_kv
        and not forward_batch.forward_mode.is_idle()
    )


def _stack_classes() -> dict[type, type]:
    """Decoder stacks whose forward is the loop above, and the class of their layers."""
    from sglang.srt.models import llama, qwen2, qwen3

    return {
        qwen2.Qwen2Model: qwen2.Qwen2DecoderLayer,
        qwen3.Qwen3Model: qwen3.Qwen3DecoderLayer,
        llama.LlamaModel: llama.LlamaDecoderLayer,
    }


def _take_apart(model: Any, layer_class: type) -> Decoder | None:
    """The stack as the loop needs it, or None where one of its layers does something else."""
    rotaries = {id(layer.self_attn.rotary_emb): layer.self_attn.rotary_emb for layer in model.layers}
    if len(rotaries) != 1 or type(next(iter(rotaries.values()))) not in rotary_classes():
        return None
    layers = [_layer(layer) if type(layer) is layer_class else None for layer in model.layers]
    known = tuple(layer for layer in layers if layer is not None)
    if len(known) != len(layers) or not _is_norm(model.norm):
        return None
    return Decoder(model, model.forward, known, next(iter(rotaries.values())))


def _layer(layer: Any) -> Layer | None:
    attention, mlp = layer.self_attn, layer.mlp
    head_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *(n for n in head_norms if n is not None)]
    products = [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]
    radix = attention.attn
    if not (
        all(map(_is_norm, norms))
        and all(map(_is_product, products))
        and type(mlp.act_fn) is SiluAndMul
        and radix.attn_type == AttentionType.DECODER
        and not radix.is_cross_attention
        and radix.k_scale is None
        and len({norm.variance_epsilon for norm in norms[2:]}) <= 1
    ):
        return None
    qkv, out, gate_up, down = map(_product, products)
    q_norm, k_norm = (None if norm is None else norm.weight for norm in head_norms)
    eps = norms[2].variance_epsilon if len(norms) > 2 else 0.0
    return Layer(
        norms[0], qkv, q_norm, k_norm, eps, radix, out, norms[1], gate_up, down,
    )  # fmt: skip


def _is_norm(norm: Any) -> bool:
    return type(norm) is RMSNorm and is_plain_norm(norm)


def _is_product(linear: Any) -> bool:
    return (
        isinstance(linear, LinearBase)
        and isinstance(linear.quant_method, UnquantizedLinearMethod)
        and not linear.skip_bias_add
    )


def _product(linear: Any) -> Product:
    return lambda x: linear.quant_method.apply(linear, x, linear.bias)
