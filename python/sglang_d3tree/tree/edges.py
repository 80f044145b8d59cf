"""What every candidate is worth below every possible parent: the hand-over from survival models to trees."""

from dataclasses import dataclass

from torch import Tensor

from sglang_d3tree.tree.candidates import Candidates


@dataclass(frozen=True)
class Edges:
    """Conditional survival of the candidates. Letters as in candidates.py; P parents is K or 1.

    log_survival [R, D, P, K] float32 <= 0: the log chance that the target accepts candidate k once it accepted
    candidate p of the depth before. The first depth has one parent, the anchor, as p = 0; its other rows are -inf.
    P = 1 says that the parent makes no difference. -inf where there is no candidate. grows says whether trees grow
    best-first in this order (METHOD 3b) or in the drafter's own, to be pruned by it afterwards (METHOD 3).
    """

    log_survival: Tensor
    grows: bool


def draft_edges(candidates: Candidates) -> Edges:
    """The draft's own guess: a candidate's marginal probability, whatever its parent. A view, nothing is computed."""
    return Edges(candidates.log_probs.unsqueeze(2), grows=True)
