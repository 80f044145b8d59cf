"""Candidates -> candidate tree, one per request, in a fixed number of rows."""

from dataclasses import dataclass

from torch import Tensor

from sgl_kernel_ext.dispatch import get_kernel
from sglang_d3tree.tree.candidates import Candidates
from sglang_d3tree.tree.edges import Edges, draft_edges


@dataclass(frozen=True)
class CandidateTree:
    """One tree per request; row 0 is the anchor, valid rows form a prefix, parents come before children.

    token_ids, parents (row of the parent), depths and ranks (position among the candidates of its depth) are
    [R, N] int64, 0 at invalid rows; parents, depths and ranks are 0 at the anchor. log_scores [R, N] float32 is the
    sum along the path of what the tree was grown by, draft log-probabilities or a head's log survival: 0 at the
    anchor, -inf at invalid rows. valid [R, N] bool. horizon, an int, is the greatest depth a node can have.
    """

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    ranks: Tensor
    log_scores: Tensor
    valid: Tensor
    horizon: int


def build_tree(
    candidates: Candidates, anchors: Tensor, max_rows: int, edges: Edges | None = None
) -> CandidateTree:
    """The max_rows - 1 nodes of highest path score below each anchor, exactly those that best-first expansion finds.

    The score is the draft's (DDTree's order, METHOD 2) or, given edges that grow, the survival they predict, every
    parent ordering its own children (METHOD 3b). anchors [R] int64. Rows come in descending score, equal scores by
    depth, then order of the parent, then rank; fewer candidates than rows leave invalid rows at the end.
    Raises ValueError for max_rows < 1.
    """
    if max_rows < 1:
        raise ValueError(f"a tree has at least its anchor's row, got max_rows = {max_rows}")
    if edges is None or not edges.grows:
        edges = draft_edges(candidates)
    kernel = get_kernel("build_tree", anchors.device.type)
    token_ids, parents, depths, ranks, log_scores, valid = kernel(
        candidates.token_ids, edges.log_survival, anchors, max_rows
    )
    return CandidateTree(token_ids, parents, depths, ranks, log_scores, valid, candidates.token_ids.shape[1])


def chain_tree(candidates: Candidates, anchors: Tensor, max_rows: int) -> CandidateTree:
    """The best candidate of every depth as one path (DFlash's chain, METHOD 2): best-first with one candidate."""
    best = Candidates(candidates.token_ids[..., :1], candidates.log_probs[..., :1], candidates.horizons)
    return build_tree(best, anchors, max_rows)
