"""How well a head predicts survival: ranking (AUC), calibration (ECE, reliability), and the rows that it saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sgl_kernel_ext.reference.head import log_chance
from sglang_d3tree.train.head_data import HeadData, labelled_parents
from sglang_d3tree.train.head_fit import child_logits, make_batch
from sglang_d3tree.train.replay import Drafts, EdgesOf, grow, head_or_draft, kept_rows
from sglang_d3tree.tree.candidates import Candidates
from sglang_d3tree.tree.head import HeadWeights, prepare_head

BINS = 15
ROWS = (4, 8, 16, 32, 64)
"""Mean rows per round at which accept lengths are reported, anchor included."""
_PIECE = 256


@dataclass(frozen=True)
class Predictions:
    """Predicted conditional survival and labels of the same nodes: predicted, draft [n] float32, accepted [n] bool."""

    predicted: Tensor
    draft: Tensor
    accepted: Tensor


def auc(scores: Tensor, labels: Tensor) -> float:
    """Chance that an accepted node scores above a rejected one, ties counting half (area under the ROC curve).

    NaN where all labels are alike.
    """
    values, place = scores.double().unique(return_inverse=True)
    positive = torch.zeros_like(values).index_add_(0, place, labels.double())
    negative = torch.zeros_like(values).index_add_(0, place, (~labels).double())
    below = negative.cumsum(0) - negative / 2
    pairs = positive.sum() * negative.sum()
    return float((positive * below).sum() / pairs) if pairs > 0 else float("nan")


@dataclass(frozen=True)
class Bin:
    """Nodes with predictions in one of BINS equal intervals: their share, mean prediction and acceptance."""

    share: float
    predicted: float
    accepted: float


def reliability(predicted: Tensor, accepted: Tensor, bins: int = BINS) -> list[Bin]:
    """The bins that hold any node, in ascending order."""
    place = (predicted * bins).long().clamp(0, bins - 1)
    found = []
    for i in range(bins):
        inside = place == i
        if inside.any():
            found.append(
                Bin(
                    float(inside.double().mean()),
                    float(predicted[inside].double().mean()),
                    float(accepted[inside].double().mean()),
                )
            )
    return found


def expected_calibration_error(bins: Sequence[Bin]) -> float:
    """Mean distance of prediction and acceptance over the bins, weighted by their nodes (Naeini et al. 2015)."""
    return sum(b.share * abs(b.predicted - b.accepted) for b in bins)


@torch.no_grad()
def predict(head: HeadWeights, data: HeadData, embedding: Tensor) -> tuple[Predictions, Predictions]:
    """Predictions for (the nodes of the verified trees, every candidate below every labelled parent)."""
    nodes: list[tuple[Tensor, Tensor, Tensor]] = []
    children: list[tuple[Tensor, Tensor, Tensor]] = []
    for index in torch.arange(len(data)).split(_PIECE):
        part = data[index]
        batch = make_batch(part, embedding)
        logits = child_logits(head, batch.states, batch.children, batch.log_probs, batch.parents, batch.depths)
        predicted = log_chance(logits, head.exclusive).exp()
        draft = batch.log_probs[torch.arange(len(part))[:, None], batch.depths].exp()
        values = predicted, draft, batch.accepted
        valid = labelled_parents(part).valid
        children.append(tuple(v[valid].flatten() for v in values))  # type: ignore[arg-type]
        is_node = part.tree_valid & (part.tree_depths > 0)
        at = torch.arange(len(part))[:, None], part.tree_parents.long(), part.tree_ranks.long()
        nodes.append(tuple(v[at][is_node] for v in values))  # type: ignore[arg-type]
    first, second = (
        Predictions(*(torch.cat(column) for column in zip(*parts, strict=True))) for parts in (nodes, children)
    )
    return first, second


def known_drafts(data: HeadData) -> Drafts:
    """The drafts with the target's greedy continuation, as far as the recorded answer follows it."""
    follows = torch.ones_like(data.path_valid)
    follows[:, 1:] = data.path_tokens[:, 1:] == data.path_targets[:, :-1]
    known = (follows & data.path_valid).long().cumprod(1).bool()
    candidates = Candidates(
        data.token_ids.long(), data.log_probs, torch.full((len(data),), data.token_ids.shape[1])
    )
    return Drafts(
        data.path_tokens[:, 0].long(), data.states.float(), candidates, data.path_targets.long().where(known, -1)
    )


def accept_lengths(drafts: Drafts, policy: str, edges_of: EdgesOf, max_rows: int) -> dict[int, float]:
    """Mean tokens per round at the same mean rows per round, over single rounds from the drafts' anchors.

    d3tree competes for rows over all drafts, which is the threshold that keeps as many; ddtree takes as many in each.
    """
    grown = grow(drafts, policy, edges_of, max_rows)
    values = grown.survival[grown.valid].sort(descending=True).values
    found = {}
    for rows in ROWS:
        if rows > max_rows:
            continue
        limit = float(rows)
        if policy == "d3tree":
            limit = float(values[min(rows * len(drafts.anchors), len(values)) - 1])
        inside = torch.arange(max_rows) < kept_rows(grown, policy, limit)[:, None]
        found[rows] = float((grown.accepted & inside).sum(1).double().mean())
    return found


def report(head: HeadWeights, data: HeadData, embedding: Tensor, max_rows: int) -> dict[str, Any]:
    """Numbers of one head on validation drafts, beside those of the draft's own probabilities."""
    tables = prepare_head(head, [embedding])
    drafts = known_drafts(data)
    found: dict[str, Any] = {
        "drafts": len(data),
        "conversations": len(data.conversation.unique()),
        "accept_length_at_rows": {
            "ddtree": accept_lengths(drafts, "ddtree", head_or_draft(None), max_rows),
            "d3tree by the draft": accept_lengths(drafts, "d3tree", head_or_draft(None), max_rows),
            "d3tree by the head": accept_lengths(drafts, "d3tree", head_or_draft(tables), max_rows),
        },
    }
    for name, p in zip(("tree_nodes", "all_candidates"), predict(head, data, embedding), strict=True):
        if not len(p.accepted):
            continue
        bins, draft_bins = reliability(p.predicted, p.accepted), reliability(p.draft, p.accepted)
        found[name] = {
            "nodes": len(p.accepted),
            "accepted": float(p.accepted.double().mean()),
            "auc": auc(p.predicted, p.accepted),
            "auc_of_draft": auc(p.draft, p.accepted),
            "ece": expected_calibration_error(bins),
            "ece_of_draft": expected_calibration_error(draft_bins),
            "reliability": [vars(b) for b in bins],
            "reliability_of_draft": [vars(b) for b in draft_bins],
        }
    return found


def plot(found: Mapping[str, Any], title: str, path: Path) -> None:
    """Reliability of the tree's nodes, and accept length against rows.

    Raises:
        RuntimeError: where matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("the plot needs matplotlib: pip install 'sglang-d3tree[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    nodes = found.get("tree_nodes") or found["all_candidates"]
    for name, key, score in (("head", "reliability", "ece"), ("draft", "reliability_of_draft", "ece_of_draft")):
        bins = nodes[key]
        left.plot(
            [b["predicted"] for b in bins], [b["accepted"] for b in bins], marker="o",
            label=f"{name}, ECE {nodes[score]:.3f}",
        )  # fmt: skip
    left.plot((0, 1), (0, 1), color="black", linewidth=0.8)
    left.set(xlabel="predicted conditional survival", ylabel="accepted", title=title)
    for name, points in found["accept_length_at_rows"].items():
        right.plot([int(rows) for rows in points], list(points.values()), marker="o", label=name)
    right.set(xscale="log", xlabel="mean rows per round, anchor included", ylabel="tokens per round")
    for axis in (left, right):
        axis.grid(True, alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
