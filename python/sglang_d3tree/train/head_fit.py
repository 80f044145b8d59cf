"""Fits a tree-size head to labelled candidates, with drafter and target frozen (METHOD 3, training; 3b, path term).

Letters in shapes: n drafts, M parents of a draft, D horizon, K candidates per depth, H hidden size, r rank.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_d3tree.train.head_data import HeadData, labelled_parents
from sglang_d3tree.tree.head import HeadWeights, PathWeights, draft_feature

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FitOptions:
    """How a head is trained.

    rank: of the path term; 0 is the published linear head. exclusive: softmax over a parent's candidates and "none of
    them" instead of a sigmoid for each. warmup: share of the steps before the learning rate is whole. ema: of the
    averaged weights, which are the ones validated and kept. rejected: weight of the children of parents that the
    target rejects; 1 counts all nodes alike, as METHOD 3 says. patience: epochs without a better
    validation loss before the fit ends.
    """

    seed: int = 0
    rank: int = 0
    exclusive: bool = False
    rejected: float = 1.0
    epochs: int = 20
    batch: int = 64
    lr: float = 1e-3
    warmup: float = 0.05
    weight_decay: float = 0.02
    ema: float = 0.99
    patience: int = 4


class HeadModule(nn.Module):
    """A head as parameters, in units in which its inputs have size 1; ``weights()`` is the head in the inputs' own.

    Embeddings are tens of times smaller than states: in their own units one learning rate could not serve both.
    """

    def __init__(self, hidden: int, rank: int, exclusive: bool, state_size: float, embedding_size: float) -> None:
        super().__init__()
        self.exclusive, self.state_size, self.embedding_size = exclusive, state_size, embedding_size
        # The draft's own log-probability is where the fit starts; with a path term, its very chances (draft_odds).
        self.state, self.token = nn.Parameter(torch.zeros(hidden)), nn.Parameter(torch.zeros(hidden))
        self.log_prob, self.bias = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))
        self.parent = self.query = self.child = None
        if rank:
            # One factor starts at zero: so does the path term, and yet it has a gradient.
            self.parent = nn.Parameter(torch.randn(rank, hidden) * hidden**-0.5)
            self.query = nn.Parameter(torch.randn(rank, hidden) * hidden**-0.5)
            self.child = nn.Parameter(torch.zeros(rank, hidden))

    @torch.no_grad()
    def start_from(self, weights: HeadWeights) -> None:
        """Take the values of a trained head of the same shape."""
        self.state.copy_(weights.state * self.state_size)
        self.token.copy_(weights.token * self.embedding_size)
        self.log_prob.copy_(weights.log_prob)
        self.bias.copy_(weights.bias)
        if weights.path is not None:
            assert self.parent is not None and self.query is not None and self.child is not None
            self.parent.copy_(weights.path.parent * self.embedding_size)
            self.query.copy_(weights.path.query * self.state_size)
            self.child.copy_(weights.path.child * self.embedding_size)

    def weights(self) -> HeadWeights:
        """The trained head; gradients flow through it."""
        path = None
        if self.parent is not None and self.query is not None and self.child is not None:
            path = PathWeights(
                self.parent / self.embedding_size, self.query / self.state_size, self.child / self.embedding_size
            )
        return HeadWeights(
            self.state / self.state_size, self.token / self.embedding_size, self.log_prob, self.bias, path,
            self.exclusive,
        )  # fmt: skip


def child_logits(
    head: HeadWeights, states: Tensor, children: Tensor, log_probs: Tensor, parents: Tensor, depths: Tensor
) -> Tensor:
    """The head's logits of all candidates below given parents: [n, M, K] (the formula of tree/head.py).

    states [n, D, H]; children [n, D, K, H], the candidates' embeddings; log_probs [n, D, K]; parents [n, M, H]
    embeddings; depths [n, M] int64 in 0..D-1: a parent's children are the candidates at that index of D.
    """
    feature = draft_feature(log_probs, path=head.path is not None, exclusive=head.exclusive)
    own = (states @ head.state)[..., None] + children @ head.token + head.log_prob * feature + head.bias
    logits = _at(own, depths)
    if head.path is not None:
        left = parents @ head.path.parent.T + _at(states @ head.path.query.T, depths)
        right = _at(children @ head.path.child.T, depths)  # [n, M, K, r]
        logits = logits + (right @ left[..., None]).squeeze(-1)
    return logits


def _at(values: Tensor, depths: Tensor) -> Tensor:
    """values [n, D, ...] at depths [n, M] -> [n, M, ...]."""
    return values[torch.arange(len(values))[:, None], depths]


def survival_loss(logits: Tensor, accepted: Tensor, exclusive: bool) -> Tensor:
    """Losses [...] of parents' children, logits and labels [..., K] (METHOD 3: binary cross-entropy on conditional
    labels, summed over the children; exclusive, METHOD 3b: cross-entropy over the children and "none", logit 0)."""
    if not exclusive:
        return F.binary_cross_entropy_with_logits(logits, accepted.float(), reduction="none").sum(-1)
    chosen = (logits * accepted).sum(-1)  # 0, the logit of "none", where nothing is accepted
    return torch.cat((logits, torch.zeros_like(logits[..., :1])), -1).logsumexp(-1) - chosen


@dataclass(frozen=True)
class Batch:
    """Drafts with all that a loss needs: as in ``child_logits``, accepted [n, M, K] bool labels, weight [n, M]."""

    states: Tensor
    children: Tensor
    log_probs: Tensor
    parents: Tensor
    depths: Tensor
    accepted: Tensor
    weight: Tensor

    def loss(self, head: HeadWeights) -> Tensor:
        """Weighted mean over the parents."""
        logits = child_logits(head, self.states, self.children, self.log_probs, self.parents, self.depths)
        losses = survival_loss(logits, self.accepted, head.exclusive)
        return (losses * self.weight).sum() / self.weight.sum()


def make_batch(data: HeadData, embedding: Tensor, rejected: float = 1.0) -> Batch:
    """Labels of all children of all parents of some drafts. embedding [V, H]."""
    found = labelled_parents(data)
    depths = found.depths.clamp(max=data.token_ids.shape[1] - 1)  # rows of the last depth have weight 0
    children = data.token_ids.long()
    accepted = _at(children, depths) == found.targets[..., None]
    weight = found.valid * torch.where(found.accepted, 1.0, rejected)
    return Batch(
        data.states.float(), embedding[children], data.log_probs, embedding[found.tokens], depths, accepted, weight
    )


@torch.no_grad()
def mean_loss(head: HeadWeights, data: HeadData, embedding: Tensor, rejected: float, batch: int = 256) -> float:
    """The loss over all drafts."""
    total = weight = 0.0
    for index in torch.arange(len(data)).split(batch):
        part = make_batch(data[index], embedding, rejected)
        total += float(part.loss(head) * part.weight.sum())
        weight += float(part.weight.sum())
    return total / weight


def split_by_conversation(data: HeadData, seed: int, share: float = 0.15) -> tuple[HeadData, HeadData]:
    """(training, validation) drafts; all drafts of a conversation are on one side.

    Raises:
        ValueError: fewer than two conversations.
    """
    conversations = data.conversation.unique()
    if len(conversations) < 2:
        raise ValueError("a head needs drafts of two conversations at least, one of them for validation")
    rng = torch.Generator().manual_seed(seed)
    order = conversations[torch.randperm(len(conversations), generator=rng)]
    held = torch.isin(data.conversation, order[: max(1, round(share * len(order)))])
    return data[(~held).nonzero().squeeze(1)], data[held.nonzero().squeeze(1)]


def _batches(data: HeadData, size: int, rng: torch.Generator) -> Iterator[HeadData]:
    for index in torch.randperm(len(data), generator=rng).split(size):
        yield data[index]


def fit(
    train: HeadData, validation: HeadData, embedding: Tensor, options: FitOptions
) -> tuple[HeadWeights, list[float]]:
    """The head with the least validation loss, and the validation loss before the first and after every epoch.

    Validation looks at accepted parents alone, whatever ``rejected`` is: a round's walk never gets below another one,
    and there a head can gain a lot (the draft knows least) while it loses where tokens are won.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        sizes = typical_size(train.states.float()), typical_size(embedding)
        module = HeadModule(embedding.shape[1], options.rank, options.exclusive, *sizes)
    decayed = [p for p in module.parameters() if p.ndim]
    free = [module.log_prob, module.bias]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": options.weight_decay}, {"params": free, "weight_decay": 0.0}],
        lr=options.lr,
    )
    steps = options.epochs * math.ceil(len(train) / options.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: learning_rate(i, steps, options.warmup))
    average = copy.deepcopy(module).requires_grad_(False)
    done = 0
    rng = torch.Generator().manual_seed(options.seed)
    curve = [mean_loss(module.weights(), validation, embedding, 0.0)]
    best = copy.deepcopy(average.state_dict())
    for epoch in range(options.epochs):
        for drafts in _batches(train, options.batch, rng):
            loss = make_batch(drafts, embedding, options.rejected).loss(module.weights())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            done += 1
            decay = min(options.ema, (1 + done) / (10 + done))
            with torch.no_grad():
                for mean, value in zip(average.parameters(), module.parameters(), strict=True):
                    mean.lerp_(value, 1 - decay)
        curve.append(mean_loss(average.weights(), validation, embedding, 0.0))
        log.info("epoch %d  training loss %.4f  validation loss %.4f", epoch + 1, float(loss.detach()), curve[-1])
        if curve[-1] == min(curve):
            best = copy.deepcopy(average.state_dict())
        elif len(curve) - 1 - curve.index(min(curve)) >= options.patience:
            break
    module.load_state_dict(best)
    return detached(module.weights()), curve


def learning_rate(step: int, steps: int, warmup: float) -> float:
    """Share of the learning rate at a step: linear over the first ``warmup`` of the steps, then a cosine to 0."""
    rising = warmup * steps
    if step < rising:
        return (step + 1) / (rising + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1.0, steps - rising)))


def typical_size(values: Tensor) -> float:
    """Root mean square of all entries."""
    return float(values.square().mean().sqrt())


def detached(w: HeadWeights) -> HeadWeights:
    """The same head without gradients."""
    path = w.path and PathWeights(w.path.parent.detach(), w.path.query.detach(), w.path.child.detach())
    return HeadWeights(
        w.state.detach(), w.token.detach(), w.log_prob.detach().clone(), w.bias.detach().clone(), path, w.exclusive
    )
