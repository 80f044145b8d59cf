"""What a round costs, as the policies need it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class VerifyCost:
    """Costs of one round for one request, in any common unit.

    draft, a number: the draft pass. verify [N] float32: the verify pass with 1 to N rows, so verify[n] is the cost
    of n nodes and their anchor.
    """

    draft: float
    verify: Tensor


def linear_cost(
    max_rows: int, draft: float = 0.3, first_row: float = 1.0, per_row: float = 0.0129, device: str | None = None
) -> VerifyCost:
    """A stand-in until a machine is calibrated: the first row costs one decode step, every further row per_row.

    The defaults, in units of one decode step, put 32 rows at 1.4 and the draft at 0.3 (METHOD 8, last point).
    """
    rows = torch.arange(max_rows, dtype=torch.float32, device=device)
    return VerifyCost(draft, first_row + per_row * rows)
