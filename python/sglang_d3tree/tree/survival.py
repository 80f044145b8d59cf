"""How likely the target is to accept each node: given its parent, and along the whole path."""

from torch import Tensor

from sgl_kernel_ext.dispatch import get_kernel
from sglang_d3tree.tree.build import CandidateTree


def conditional_survival(tree: CandidateTree) -> Tensor:
    """The draft's own guess [R, N] float32 that a node is accepted once its parent is: its marginal probability.

    1 at the anchor, 0 at invalid rows. The guess that needs no trained head (METHOD 3 replaces it by one).
    """
    return (tree.log_scores - tree.log_scores.gather(1, tree.parents)).exp()


def path_product(conditional: Tensor, tree: CandidateTree) -> Tensor:
    """Survival [R, N] float32 of every node: the product of conditional [R, N] in [0, 1] along its path (METHOD 3).

    1 at the anchor whatever conditional says there, 0 at invalid rows. It never rises from parent to child, rounding
    included, so the nodes above any threshold are ancestor-closed.
    """
    kernel = get_kernel("path_product", conditional.device.type)
    return kernel(conditional * tree.valid, tree.parents, tree.horizon)
