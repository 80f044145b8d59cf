"""The trained head in the scheduler process: loaded beside the drafter, multiplied with the target's embedding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from sglang_d3tree.head_file import FOLDER, HeadFile, load_head
from sglang_d3tree.tree.candidates import Candidates
from sglang_d3tree.tree.edges import Edges, draft_edges
from sglang_d3tree.tree.head import TreeHead, head_edges, prepare_head

# Embeddings looked up at once; a whole large vocabulary in float32 would take gigabytes for a moment.
_PIECE = 1 << 14


def read_head(choice: str, draft_path: str, target_path: str) -> HeadFile | None:
    """The head that ``--speculative-d3tree-head`` names; paths may be names on a model hub.

    Raises:
        ValueError: naming the flag, as ``head_file.load_head`` does.
    """
    if choice == "none":
        return None
    drafter = _local(draft_path)
    if choice == "auto" and not (drafter / FOLDER).is_dir():
        return None  # nothing to compare with the target, which may still have to be downloaded
    return load_head(drafter, _local(target_path), choice)


def _local(path: str) -> Path:
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path))


class SurvivalModel:
    """How the worker predicts survival: by a trained head, or by the draft's own probabilities."""

    def __init__(
        self,
        file: HeadFile | None,
        embed: Callable[[torch.Tensor], torch.Tensor],
        vocabulary: int,
        device: torch.device | str,
    ) -> None:
        self.kind = file.weights.kind if file else "draft"
        self.topk = file.topk if file else None
        self._head: TreeHead | None = None
        if file is not None:
            ids = torch.arange(vocabulary, device=device)
            weights = file.weights.to(device)
            with torch.inference_mode():
                self._head = prepare_head(weights, (embed(piece) for piece in ids.split(_PIECE)))

    def describe(self) -> str:
        """For the start-up log."""
        if self._head is None:
            return "the draft path probability (no trained head)"
        return f"predicted by the trained {self.kind} head over {self.topk} candidates per depth"

    def edges(self, candidates: Candidates, hidden: torch.Tensor, anchors: torch.Tensor) -> Edges:
        """Conditional survival of the candidates; hidden [R, D, H] are the draft states they came from."""
        if self._head is None:
            return draft_edges(candidates)
        return head_edges(self._head, candidates, hidden, anchors)
