"""Matrix products with a weight stored in the kernel's own order, in plain torch: the specification."""

from __future__ import annotations

import torch

PACKED_DTYPES = (torch.float32, torch.bfloat16)


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """A weight [N, K] in the order that `packed_linear` of the same implementation reads; here, as it is.

    Raises:
        TypeError: a dtype that the implementation has no fast products for (here: all but float32 and bfloat16).
    """
    if weight.dtype not in PACKED_DTYPES:
        raise TypeError(f"pack_weight: float32 or bfloat16 expected, got {weight.dtype}")
    return weight.clone()


def packed_linear(x: torch.Tensor, packed: torch.Tensor, outputs: int, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias``, summed in float32 and rounded once.

    Args:
        x: [T, K], the weight's dtype.
        packed: what `pack_weight` made of the weight [N, K].
        outputs: N.
        bias: [N] or None.

    Returns:
        [T, N] in x's dtype. A row's values do not depend on the other rows (float32 here: up to rounding).
    """
    if packed.shape[0] != outputs:
        raise ValueError(f"packed_linear: the weight has {packed.shape[0]} outputs, not {outputs}")
    product = x.float() @ packed.float().T
    return (product if bias is None else product + bias.float()).to(x.dtype)
