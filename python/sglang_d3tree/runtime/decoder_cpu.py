"""The decoder stack of common families on the CPU platform: SGLang's modules and weights, one short loop.

With small models SGLang's general layer code (stage boundaries, communication, dispatch) takes longer than the
arithmetic between the matrix products. ``install`` replaces the stack's ``forward`` where it is exactly this loop:
one device, no adapters, attention through ``D3TreeCpuAttnBackend``. Everything else keeps SGLang's forward.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.aux_hidden_states import AuxHiddenStateList
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.runtime_context import get_exec, get_lora, get_observability, get_parallel

from sgl_kernel_ext.cpu import layer_ops
from sgl_kernel_ext.dispatch import get_kernel
from sglang_d3tree.runtime.attention_cpu import D3TreeCpuAttnBackend
from sglang_d3tree.runtime.layers_cpu import is_plain_norm, rotary_classes
from sglang_d3tree.runtime.linear_cpu import PackedLinearMethod, Product, product_of

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

logger = logging.getLogger(__name__)

_rms_norm = get_kernel("rms_norm", "cpu")
_add_rms_norm = get_kernel("add_rms_norm", "cpu")
_silu_and_mul = get_kernel("silu_and_mul", "cpu")
_rotate_and_store = get_kernel("rotate_and_store", "cpu")


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: the modules that hold its weights, and its matrix products."""

    input_norm: RMSNorm
    qkv: Product
    q_heads: int
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
    """A decoder stack: SGLang's model, its own forward, its layers, the rotary embedding and type that they share."""

    model: Any
    stock_forward: Callable[..., Any]
    layers: tuple[Layer, ...]
    rotary: Any
    dtype: torch.dtype


def install(model: torch.nn.Module) -> None:
    """Give every stack inside a loaded model that this loop covers the loop as its forward."""
    parallel, watched = get_parallel(), get_observability()
    if parallel.tp_size > 1 or parallel.pp_size > 1 or get_lora().enable_lora or layer_ops() is None:
        return
    if watched.forward_hooks or watched.debug_tensor_dump_output_folder is not None:
        # Whoever looks into the modules wants them called.
        return
    if get_exec().deterministic.rl_on_policy_target is not None:
        return
    known = _stacks()
    for module in model.modules():
        if type(module) not in known:
            continue
        layer_class, run = known[type(module)]
        decoder = _take_apart(module, layer_class)
        if decoder is not None:
            module.forward = functools.partial(run, decoder)  # type: ignore[method-assign]
            logger.info("%s runs its %d layers in the CPU platform's loop.", type(module).__name__, len(decoder.layers))


def target_forward(
    decoder: Decoder,
    input_ids: torch.Tensor | None,
    positions: torch.Tensor,
    forward_batch: ForwardBatch,
    input_embeds: torch.Tensor | None = None,
    pp_proxy_tensors: Any = None,
) -> Any:
    """What SGLang's own forward returns: final hidden states [T, H], with captured ones if any were asked for."""
    model, backend = decoder.model, get_attn_backend()
    hidden = model.embed_tokens(input_ids) if input_embeds is None else input_embeds
    if pp_proxy_tensors is not None or not _covers(decoder, backend, forward_batch, positions, hidden):
        return decoder.stock_forward(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
    captured = AuxHiddenStateList()
    hidden = _run(decoder, backend, hidden, positions, forward_batch.out_cache_loc, model.layers_to_capture, captured)
    return (hidden, captured) if captured else hidden


def draft_forward(
    decoder: Decoder,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: ForwardBatch,
    input_embeds: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """What SGLang's DFLASH drafter returns: final hidden states [T, H] in a LogitsProcessorOutput."""
    model, backend = decoder.model, get_attn_backend()
    if input_embeds is None and model.embed_tokens is None and hasattr(model, "forward_embed"):
        input_embeds = model.forward_embed(input_ids)
    if input_embeds is None or not _covers(decoder, backend, forward_batch, positions, input_embeds):
        return decoder.stock_forward(input_ids, positions, forward_batch, input_embeds, *args, **kwargs)
    with torch.no_grad():
        hidden = _run(decoder, backend, input_embeds, positions, forward_batch.out_cache_loc, (), [])
    return LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden)


def _run(
    decoder: Decoder,
    backend: D3TreeCpuAttnBackend,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    layers_to_capture: Collection[int],
    captured: list[torch.Tensor],
) -> torch.Tensor:
    """All layers and the last norm; the inputs of `layers_to_capture` are appended to `captured`."""
    rotary = decoder.rotary
    table, neox, axes = rotary.cos_sin_cache, rotary.is_neox_style, rotary.axis_map if positions.dim() == 2 else None
    residual: torch.Tensor | None = None
    for index, layer in enumerate(decoder.layers):
        normed, residual = _norm(layer.input_norm, hidden, residual)
        if index in layers_to_capture:
            captured.append(residual)
        keys, values = backend.kv_buffers(layer.attention)
        q = _rotate_and_store(
            layer.qkv(normed), layer.q_heads, positions, table, axes, neox, keys, values, slots,
            layer.q_norm, layer.k_norm, layer.head_norm_eps,
        )  # fmt: skip
        hidden = layer.out(backend.attend(layer.attention, q))
        normed, residual = _norm(layer.post_norm, hidden, residual)
        hidden = layer.down(_silu_and_mul(layer.gate_up(normed)))
    return _norm(decoder.model.norm, hidden, residual)[0]


def _norm(
    norm: RMSNorm, hidden: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if residual is None:
        return _rms_norm(hidden, norm.weight, norm.variance_epsilon), hidden
    normed, total = _add_rms_norm(hidden, residual, norm.weight, norm.variance_epsilon)
    return normed, total


def _covers(
    decoder: Decoder,
    backend: AttentionBackend,
    forward_batch: ForwardBatch,
    positions: torch.Tensor,
    hidden: torch.Tensor,
) -> bool:
    slots = forward_batch.out_cache_loc
    return (
        isinstance(backend, D3TreeCpuAttnBackend)
        and backend.takes_rows_of(decoder.dtype)
        and not forward_batch.forward_mode.is_idle()
        and slots is not None
        and slots.dtype == torch.int64
        # Fewer slots than rows: SGLang pads the rows and strips them again around attention.
        and slots.numel() == positions.shape[-1] == hidden.shape[0]
        and hidden.dtype == decoder.dtype
        and (positions.dim() == 1 or getattr(decoder.rotary, "axis_map", None) is not None)
    )


def _stacks() -> dict[type, tuple[type, Callable[..., Any]]]:
    """Decoder stacks whose forward is the loop above: the class of their layers and the function that replaces it."""
    from sglang.srt.models import dflash, llama, qwen2, qwen3

    return {
        qwen2.Qwen2Model: (qwen2.Qwen2DecoderLayer, target_forward),
        qwen3.Qwen3Model: (qwen3.Qwen3DecoderLayer, target_forward),
        llama.LlamaModel: (llama.LlamaDecoderLayer, target_forward),
        dflash.DFlashDraftModel: (dflash.DFlashDecoderLayer, draft_forward),
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
    return Decoder(model, model.forward, known, next(iter(rotaries.values())), model.norm.weight.dtype)


def _layer(layer: Any) -> Layer | None:
    attention, mlp = layer.self_attn, layer.mlp
    head_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *(n for n in head_norms if n is not None)]
    products = [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]
    radix = attention.attn
    # What only some drafters have.
    extras = [getattr(attention, name, None) for name in ("v_scale", "attention_sink_bias")]
    extras += [getattr(layer, name, None) for name in ("attention_conv", "mlp_conv")]
    if not (
        all(map(_is_norm, norms))
        and all(map(_is_product, products))
        and all(extra is None for extra in extras)
        and type(mlp.act_fn) is SiluAndMul
        and radix.attn_type in (AttentionType.DECODER, AttentionType.ENCODER_ONLY)
        and not radix.is_cross_attention
        and radix.k_scale is None
        and radix.logit_cap == 0
        and radix.xai_temperature_len <= 0
        and len({norm.variance_epsilon for norm in norms[2:]}) <= 1
        and len({linear.weight.dtype for linear in products} | {norm.weight.dtype for norm in norms}) == 1
    ):
        return None
    qkv, out, gate_up, down = map(product_of, products)
    q_norm, k_norm = (None if norm is None else norm.weight for norm in head_norms)
    eps = norms[2].variance_epsilon if len(norms) > 2 else 0.0
    return Layer(norms[0], qkv, radix.tp_q_head_num, q_norm, k_norm, eps, radix, out, norms[1], gate_up, down)


def _is_norm(norm: Any) -> bool:
    return type(norm) is RMSNorm and is_plain_norm(norm)


def _is_product(linear: Any) -> bool:
    return (
        isinstance(linear, LinearBase)
        and type(linear.quant_method) in (UnquantizedLinearMethod, PackedLinearMethod)
        and not linear.skip_bias_add
    )
