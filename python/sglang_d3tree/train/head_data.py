"""What a tree-size head learns from: drafts, candidate trees, and what the target says after every node (METHOD 3).

Letters in shapes: n drafts, D horizon, K candidates per depth, H hidden size, N rows of a candidate tree.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_d3tree.train.replay import whole_paths


@dataclass(frozen=True)
class HeadData:
    """Drafts at random anchors. Index d of a D axis is depth d + 1, except in path_*, where it is depth d.

    states [n, D, H] bfloat16, the draft states; token_ids [n, D, K] int32 and log_probs [n, D, K] float32, the
    candidates; conversation [n] int32, the same number for drafts of one conversation; kind [n] int32, into
    prompts.KINDS.

    The candidate tree, as in CandidateTree: tree_tokens, tree_parents, tree_depths, tree_ranks [n, N] int32,
    tree_valid [n, N] bool, all false where no tree was verified; tree_targets [n, N] int32, the target's argmax after
    each row's path.

    The reference path, which is the conversation itself: path_tokens [n, D] int32, the anchor and what follows it;
    path_targets [n, D] int32, the target's argmax after each of them; path_valid [n, D] bool, inside the answer.
    """

    states: Tensor
    token_ids: Tensor
    log_probs: Tensor
    conversation: Tensor
    kind: Tensor
    tree_tokens: Tensor
    tree_parents: Tensor
    tree_depths: Tensor
    tree_ranks: Tensor
    tree_valid: Tensor
    tree_targets: Tensor
    path_tokens: Tensor
    path_targets: Tensor
    path_valid: Tensor

    def __len__(self) -> int:
        return self.states.shape[0]

    def __getitem__(self, index: Tensor) -> HeadData:
        return HeadData(*(getattr(self, f.name)[index] for f in fields(self)))


def concatenate(parts: Sequence[HeadData]) -> HeadData:
    """All drafts of all parts, in order."""
    return HeadData(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(HeadData)))


def save_data(path: Path, data: HeadData) -> None:
    """Write one shard atomically."""
    partial = path.with_suffix(".partial")
    save_file({f.name: getattr(data, f.name).contiguous() for f in fields(data)}, partial)
    os.replace(partial, path)


def load_data(path: Path) -> HeadData:
    """The inverse of ``save_data``."""
    return HeadData(**load_file(path))


def accepted_rows(data: HeadData) -> Tensor:
    """Tree rows [n, N] bool that the target accepts: the anchor, and nodes that continue an accepted parent."""
    parents = data.tree_parents.long()
    continues = data.tree_targets.gather(1, parents) == data.tree_tokens
    anchors, horizon = data.tree_valid & (data.tree_depths == 0), data.token_ids.shape[1]
    return whole_paths(anchors, data.tree_valid & continues, data.tree_depths, parents, horizon)


def path_in_tree(data: HeadData) -> Tensor:
    """Which places of the reference path [n, D] bool are rows of the candidate tree, too."""
    row = torch.zeros(len(data), dtype=torch.long)
    found = [data.tree_valid[:, 0]]
    for depth in range(1, data.path_tokens.shape[1]):
        child = (
            data.tree_valid
            & (data.tree_depths == depth)
            & (data.tree_parents == row[:, None])
            & (data.tree_tokens == data.path_tokens[:, depth, None])
        )
        found.append(found[-1] & child.any(dim=1))
        row = child.long().argmax(dim=1)
    return torch.stack(found, dim=1)


@dataclass(frozen=True)
class Parents:
    """Rows below which every candidate is labelled: those of the tree, then the reference path's that are not among
    them. M = N + D.

    tokens, depths, targets [n, M] int64; accepted [n, M] bool: the target emits the row's whole path; valid [n, M]
    bool: the row exists and has children, which are the candidates at index ``depths`` of the draft. A child is
    accepted, given this parent, if its token equals ``targets``.
    """

    tokens: Tensor
    depths: Tensor
    targets: Tensor
    accepted: Tensor
    valid: Tensor


def labelled_parents(data: HeadData) -> Parents:
    """Every row whose children have labels, whether the row itself is accepted or not (METHOD 3, labels)."""
    n, horizon = data.path_tokens.shape
    steps = torch.arange(horizon).expand(n, horizon)
    # Greedy or sampled, the reference path is what the target said; it is *accepted* as far as it is greedy.
    greedy = torch.ones(n, horizon, dtype=torch.bool)
    greedy[:, 1:] = data.path_targets[:, :-1] == data.path_tokens[:, 1:]
    return Parents(
        tokens=torch.cat((data.tree_tokens, data.path_tokens), 1).long(),
        depths=torch.cat((data.tree_depths, steps), 1).long(),
        targets=torch.cat((data.tree_targets, data.path_targets), 1).long(),
        accepted=torch.cat((accepted_rows(data), greedy.long().cumprod(1).bool() & data.path_valid), 1),
        valid=torch.cat(
            (data.tree_valid & (data.tree_depths < horizon), data.path_valid & ~path_in_tree(data)), 1
        ),
    )
