"""How likely the target is to accept each node: given its parent, and along the whole path."""

from torch import Tensor

from sgl_kernel_ext.dispatch import get_kernel
from sglang_d3tree.tree.build import CandidateTree
from sglang_d3tree.tree.edges import Edges


def conditional_survival(tree: CandidateTree, edges: Edges | None = None) -> Tensor:
    """The chance [R, N] float32 that a node is accepted once its parent is; 1 at the anchor, 0 at invalid rows.

    Without edges, or with edges that the tree grew by, it is what the tree grew by: the draft's marginal probability,
    the guess that needs no trained head, or the head's. Other edges are looked up at every node (METHOD 3).
    """
    if edges is None or edges.grows:
        return (tree.log_scores - tree.log_scores.gather(1, tree.parents)).exp()
    *_, parents, topk = edges.log_survival.shape
    if edges.log_survival.numel() == 0:
        return tree.valid.float()
    parent_rank = tree.ranks.gather(1, tree.parents) if parents > 1 else 0
    is_node = tree.valid & (tree.depths > 0)
    place = ((tree.depths - 1) * parents + parent_rank) * topk + tree.ranks
    conditional = edges.log_survival.flatten(1).gather(1, place * is_node).exp()
    return conditional.where(is_node, tree.valid.float())


def path_product(conditional: Tensor, tree: CandidateTree) -> Tensor:
    """Survival [R, N] float32 of every node: the product of conditional [R, N] in [0, 1] along its path (METHOD 3).

    1 at the anchor whatever conditional says there, 0 at invalid rows. It never rises from parent to child, rounding
    included, so the nodes above any threshold are ancestor-closed.
    """
    kernel = get_kernel("path_product", conditional.device.type)
    return kernel(conditional * tree.valid, tree.parents, tree.horizon)
