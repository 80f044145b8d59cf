"""Matrix products of the CPU platform: weights kept a second time in the order in which the kernel reads them.

SGLang's layers call ``quant_method.apply``; ``pack_model`` swaps that method for one that reads the packed copy. The
original weight stays where it is: it is what loading, the embedding and everybody else sees.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import psutil
import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from sgl_kernel_ext.cpu import linear_ops
from sgl_kernel_ext.dispatch import get_kernel

logger = logging.getLogger(__name__)

Product = Callable[[torch.Tensor], torch.Tensor]

# Share of the free memory that the second copy of the weights may take.
_MEMORY_SHARE = 0.25
# With AMX, torch's own product wins as soon as there is enough to multiply per byte of weight.
_AMX_MOST_ROWS = 16

packed_linear = get_kernel("packed_linear", "cpu")
pack_weight = get_kernel("pack_weight", "cpu")


def packed_apply(layer: Any, x: torch.Tensor, bias: torch.Tensor | None, most_rows: int | None) -> torch.Tensor:
    """``x @ layer.weight.T + bias`` over ``layer.packed_weight``; x [..., K] -> [..., N]."""
    weight = layer.weight
    if x.dtype != weight.dtype or (most_rows is not None and x.numel() > most_rows * weight.shape[1]):
        return torch.nn.functional.linear(x, weight, bias)
    if x.dim() == 2:
        return packed_linear(x, layer.packed_weight, weight.shape[0], bias)
    out = packed_linear(x.reshape(-1, x.shape[-1]), layer.packed_weight, weight.shape[0], bias)
    return out.view(*x.shape[:-1], -1)


def product_of(layer: Any) -> Product:
    """A layer's product with its bias as one function of x [T, K], without the modules' attribute look-ups.

    New weights keep being seen: they are written into the same tensors.
    """
    return _product(layer.quant_method, layer.weight, getattr(layer, "packed_weight", None), layer.bias)


def head_product(head: Any, weight: torch.Tensor) -> Product:
    """x [T, H] -> logits [T, n] over some rows `weight` [n, H] of an LM head, multiplied the way the head is."""
    packed = None
    if isinstance(head.quant_method, PackedHeadMethod):
        packed = head.packed_weight if weight.shape == head.weight.shape else pack_weight(weight)
    return _product(head.quant_method, weight, packed, None)


def _product(method: Any, weight: torch.Tensor, packed: torch.Tensor | None, bias: torch.Tensor | None) -> Product:
    if packed is None:
        return lambda x: torch.nn.functional.linear(x, weight, bias)
    outputs, most_rows = weight.shape[0], method.most_rows
    if most_rows is None:
        return lambda x: packed_linear(x, packed, outputs, bias)

    def product(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > most_rows:
            return torch.nn.functional.linear(x, weight, bias)
        return packed_linear(x, packed, outputs, bias)

    return product


class PackedLinearMethod(UnquantizedLinearMethod):
    """Linear layers over packed weights. most_rows: above this torch's product is used; None: never."""

    def __init__(self, most_rows: int | None) -> None:
        super().__init__()
        self.most_rows = most_rows

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return packed_apply(layer, x, bias, self.most_rows)


class PackedHeadMethod(UnquantizedEmbeddingMethod):
    """LM heads over packed weights; embedding look-ups read the original."""

    def __init__(self, most_rows: int | None) -> None:
        super().__init__()
        self.most_rows = most_rows

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return packed_apply(layer, x.to(layer.weight.dtype), bias, self.most_rows)


def pack_model(model: torch.nn.Module, amx: bool) -> None:
    """Pack every unquantised linear layer and the LM head of a loaded model, if they fit into memory.

    Args:
        model: as SGLang loaded it; changed in place.
        amx: whether the CPU multiplies bfloat16 tiles.
    """
    ops: Any = linear_ops()
    if ops is None:
        return
    layers = [m for m in _layers(model) if m.weight.device.type == "cpu" and ops.can_pack(m.weight.dtype)]
    size = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
    allowed = psutil.virtual_memory().available * _MEMORY_SHARE
    if size > allowed:
        logger.warning(
            "Weights stay as they are (%.1f GB would be needed to pack them, %.1f GB are allowed): matrix products of "
            "a few rows run two to three times slower.",
            size / 1e9,
            allowed / 1e9,
        )
        return
    for layer in layers:
        most_rows = _AMX_MOST_ROWS if amx and layer.weight.dtype == torch.bfloat16 else None
        layer.packed_weight = pack_weight(layer.weight.data)
        layer.quant_method = (PackedLinearMethod if isinstance(layer, LinearBase) else PackedHeadMethod)(most_rows)
    if layers:
        model.load_weights = _then_repack(model)  # type: ignore[assignment, arg-type]


def repack_model(model: torch.nn.Module) -> None:
    """Follow new weights, which SGLang writes into the originals."""
    for layer in model.modules():
        if isinstance(getattr(layer, "quant_method", None), PackedLinearMethod | PackedHeadMethod):
            packed: Any = layer
            packed.packed_weight.copy_(pack_weight(packed.weight.data))


def _then_repack(model: Any) -> Callable[..., Any]:
    load_weights = model.load_weights

    @functools.wraps(load_weights)
    def load_and_repack(*args: Any, **kwargs: Any) -> Any:
        result = load_weights(*args, **kwargs)
        repack_model(model)
        return result

    return load_and_repack


def _layers(model: torch.nn.Module) -> list[Any]:
    found: list[Any] = [
        module
        for module in model.modules()
        if isinstance(module, LinearBase) and type(module.quant_method) is UnquantizedLinearMethod
    ]
    head: Any = getattr(model, "lm_head", None)
    is_head = isinstance(head, ParallelLMHead | VocabParallelEmbedding)
    # With a method of our own SGLang would no longer compute the logits in float32 where that was asked for.
    exact = getattr(getattr(model, "logits_processor", None), "use_fp32_lm_head", False)
    if is_head and not exact and type(head.quant_method) is UnquantizedEmbeddingMethod:
        found.append(head)
    return found
