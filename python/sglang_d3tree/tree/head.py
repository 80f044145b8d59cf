"""The tree-size head: drafted states and candidate tokens -> conditional survival (METHOD 3 and 3b).

With h the draft state of a candidate's depth, e the target's token embeddings and p the draft's log-probability, a
candidate c below the parent u has the logit

    z = state . h + token . e(c) + log_prob * x(c) + bias  [ + (parent e(u) + query h) . (child e(c)) ].

The first four terms are the published head with its 2H + 2 parameters and x = p; the bracket is the path term of METHOD
3b, and a head that has it reads x = ``draft_odds``, so that with log_prob = 1 and all else 0 it predicts exactly what
the draft does: training starts there. The conditional survival is sigmoid(z), or, since one token at most can follow, a
softmax over a depth's candidates and "none of them", whose logit is 0. With a single candidate the two agree.

Letters in shapes: R requests, D horizon, K candidates, V vocabulary, H hidden size, r rank of the path term.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sgl_kernel_ext.dispatch import get_kernel
from sgl_kernel_ext.reference.head import log_chance
from sglang_d3tree.tree.candidates import Candidates
from sglang_d3tree.tree.edges import Edges


@dataclass(frozen=True)
class PathWeights:
    """The path term's matrices, each [r, H] float32: parent and child act on embeddings, query on the draft state."""

    parent: Tensor
    query: Tensor
    child: Tensor


@dataclass(frozen=True)
class HeadWeights:
    """A trained head. state, token [H], log_prob, bias [] float32; path is None for the linear head.

    exclusive: softmax over the candidates and "none" instead of a sigmoid for each.
    """

    state: Tensor
    token: Tensor
    log_prob: Tensor
    bias: Tensor
    path: PathWeights | None = None
    exclusive: bool = False

    def to(self, device: torch.device | str) -> "HeadWeights":
        """The same head on another device."""
        path = self.path and PathWeights(
            self.path.parent.to(device), self.path.query.to(device), self.path.child.to(device)
        )
        return HeadWeights(
            self.state.to(device), self.token.to(device), self.log_prob.to(device), self.bias.to(device), path,
            self.exclusive,
        )  # fmt: skip

    @property
    def kind(self) -> str:
        return "linear" if self.path is None else "path"

    @property
    def num_parameters(self) -> int:
        """2H + 2 for the linear head, 3rH more with a path term."""
        tensors = [self.state, self.token, self.log_prob, self.bias]
        if self.path is not None:
            tensors += [self.path.parent, self.path.query, self.path.child]
        return sum(t.numel() for t in tensors)


@dataclass(frozen=True)
class PathTables:
    """The path term per token: parents, children [V, r] float32, e(u) and e(c) already multiplied."""

    parents: Tensor
    children: Tensor


@dataclass(frozen=True)
class TreeHead:
    """A head made ready for one target: what depends on a token alone is looked up.

    state [1 + r, H] float32, the state's share of the linear logit first, then the path term's query; tokens [V]
    float32, a token's share of the logit, bias included; log_prob [] float32.
    """

    state: Tensor
    tokens: Tensor
    log_prob: Tensor
    path: PathTables | None
    exclusive: bool


def prepare_head(weights: HeadWeights, embedding: Iterable[Tensor]) -> TreeHead:
    """Multiply a head's weights with the target's embedding [V, H] of any float dtype, in float32.

    The embedding comes in consecutive pieces [n, H]: a large one in float32 would take gigabytes for a moment.
    """
    path, state, tables = weights.path, weights.state[None], None
    columns = [weights.token[None]]
    if path is not None:
        state = torch.cat((state, path.query))
        columns += [path.parent, path.child]
    matrix = torch.cat(columns)
    products = torch.cat([piece.float() @ matrix.T for piece in embedding])
    if path is not None:
        rank = path.parent.shape[0]
        tables = PathTables(products[:, 1 : 1 + rank].contiguous(), products[:, 1 + rank :].contiguous())
    return TreeHead(state, products[:, 0] + weights.bias, weights.log_prob, tables, weights.exclusive)


RESIDUAL_FLOOR = 1e-6
"""Least chance of "none" in ``draft_odds``: float32 sums of probabilities are no better than that."""


def draft_odds(log_probs: Tensor, exclusive: bool) -> Tensor:
    """The logits [..., K] whose ``log_chance`` is log_probs [..., K]; -inf stays -inf.

    log p - log(1 - p); exclusive, log p - log(1 - sum of p), against the mass that the draft leaves to other tokens.
    """
    taken = log_probs.exp()
    if exclusive:
        taken = taken.sum(-1, keepdim=True)
    return log_probs - (1.0 - taken).clamp(min=RESIDUAL_FLOOR).log()


def draft_feature(log_probs: Tensor, *, path: bool, exclusive: bool) -> Tensor:
    """x of the formula, [..., K]: what a head with or without a path term reads of the draft's probabilities."""
    return draft_odds(log_probs, exclusive) if path else log_probs


def head_edges(head: TreeHead, candidates: Candidates, hidden: Tensor, anchors: Tensor) -> Edges:
    """Conditional survival of every candidate (below every parent, where the head has a path term).

    hidden [R, D, H] of any float dtype, the draft states that the candidates' logits came from; anchors [R] int64.
    A state or log-probability that is no number gives up that depth's candidates, as the draft itself would.
    """
    states = functional.linear(hidden.float(), head.state)
    if head.path is None:
        logits = states + head.tokens[candidates.token_ids] + head.log_prob * candidates.log_probs
        log_survival = log_chance(logits.where(candidates.log_probs > -torch.inf, -torch.inf), head.exclusive)
        return Edges(log_survival.unsqueeze(2), grows=False)
    kernel = get_kernel("path_edges", hidden.device.type)
    log_survival = kernel(
        candidates.token_ids, draft_feature(candidates.log_probs, path=True, exclusive=head.exclusive), anchors, states,
        head.tokens, head.log_prob, head.path.parents, head.path.children, head.exclusive,
    )  # fmt: skip
    return Edges(log_survival, grows=True)
