"""What the drafter is asked: blocks cut from the target's answers, and the loss on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sglang_d3tree.train.answers import Conversation
from sglang_d3tree.train.drafter_checkpoint import TargetEnds
from sglang_d3tree.train.drafter_model import DrafterModel
from sglang_d3tree.train.tower import rms_norm


@dataclass(frozen=True)
class BlockBatch:
    """Blocks of a few conversations.

    block_ids: [S, A, B], anchor and masks. anchors: [S, A]. labels: [S, A, B - 1], the target's own next tokens, -1
    beyond the answer's end. target_hidden: [S, T, K * H] float32, zero padded. teacher: [S, A, B - 1, H] float32, the
    target's last states (before its final norm) that predict the labels.
    """

    block_ids: torch.Tensor
    anchors: torch.Tensor
    labels: torch.Tensor
    target_hidden: torch.Tensor
    teacher: torch.Tensor


def make_blocks(
    conversations: Sequence[Conversation], anchors: torch.Tensor, block_size: int, mask_token_id: int
) -> BlockBatch:
    """Blocks at the given anchor positions. anchors: [S, A], indices into each conversation's tokens."""
    length = int(anchors.max())  # states at or after the last anchor are never visible
    tokens = torch.full((len(conversations), length + block_size), -1)
    width = conversations[0].hidden.shape[1]
    hidden = torch.zeros(len(conversations), length, width)
    final = torch.zeros(len(conversations), length + block_size, conversations[0].final.shape[1])
    for i, c in enumerate(conversations):
        tokens[i, : len(c.tokens)] = torch.tensor(c.tokens)[: length + block_size]
        n = min(length, len(c.tokens))
        hidden[i, :n] = c.hidden[:n].float()
        last = c.final[: length + block_size]
        final[i, : len(last)] = last.float()
    index = anchors[..., None] + torch.arange(block_size)
    path = tokens.gather(1, index.flatten(1)).view(index.shape)
    block_ids = torch.full_like(path, mask_token_id)
    block_ids[..., 0] = path[..., 0]
    # The label d steps after the anchor is predicted by the state one position before it.
    teacher = final[torch.arange(len(conversations))[:, None, None], index[..., :-1]]
    return BlockBatch(block_ids, anchors, path[..., 1:], hidden, teacher)


def anchor_range(c: Conversation) -> range:
    """Positions that can be anchors: every answer token that has a successor in the answer."""
    return range(c.prompt_length, len(c.tokens) - 1)


class ReducedHead:
    """A softmax over the tokens that matter, instead of all 49k.

    The frequent tokens of the data and the batch's own labels take part exactly; a uniform random sample stands in
    for the rest, its logits raised by log(rest / sample), so the partition function keeps its expectation and
    unseen tokens are still pushed down.
    """

    def __init__(self, head: torch.Tensor, frequent: torch.Tensor, sample: int) -> None:
        self.head, self.frequent = head, frequent
        self.rows = head[frequent]
        self.lookup = torch.full((head.shape[0],), -1)
        self.lookup[frequent] = torch.arange(len(frequent))
        self.others = (self.lookup < 0).nonzero().squeeze(1)
        self.sample = min(sample, len(self.others))

    def cross_entropy(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        generator: torch.Generator,
        teacher: torch.Tensor | None = None,
        soft: float = 0.0,
    ) -> torch.Tensor:
        """hidden: [N, H], labels: [N] -> losses [N] float32; hidden's dtype is that of the matrix products.

        teacher: [N, H], the target's own normalised states: the share ``soft`` of the loss is the cross-entropy with
        the target's distribution over the same tokens instead of the label alone.
        """
        slot = self.lookup[labels]
        rare, inverse = labels[slot < 0].unique(return_inverse=True)
        slot = slot.clone()
        slot[slot < 0] = len(self.frequent) + inverse
        rows, shift = [self.rows, self.head[rare]], torch.zeros(len(self.frequent) + len(rare))
        if self.sample:
            pick = self.others[torch.randint(len(self.others), (self.sample,), generator=generator)]
            rows.append(self.head[pick])
            shift = torch.cat([shift, torch.full((self.sample,), math.log(len(self.others) / self.sample))])
        weight = torch.cat(rows).to(hidden.dtype)
        logits = F.linear(hidden, weight).float() + shift
        loss = F.cross_entropy(logits, slot, reduction="none")
        if teacher is None or not soft:
            return loss
        with torch.no_grad():
            target = torch.softmax(F.linear(teacher.to(weight.dtype), weight).float() + shift, dim=-1)
        return (1 - soft) * loss + soft * (logits.logsumexp(dim=-1) - (target * logits).sum(dim=-1))


def block_loss(
    model: DrafterModel,
    ends: TargetEnds,
    head: ReducedHead,
    batch: BlockBatch,
    gamma: float,
    generator: torch.Generator,
    soft: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Cross-entropy on the target's own continuation, weight exp(-(d - 1) / gamma) at depth d.

    Early positions count more: a wrong token ends the accepted path, whatever follows it. soft: share of the loss
    that asks for the target's whole distribution along its path; it says which other tokens were nearly chosen, which
    orders a tree's candidates and keeps a small data set from being learnt by heart. dtype: of the matrix products;
    bfloat16 is twice as fast where the CPU has bfloat16 dot products.
    """
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        hidden = model(ends.embedding[batch.block_ids], batch.anchors, batch.target_hidden)[..., 1:, :]
    valid = batch.labels >= 0
    weight = torch.exp(-torch.arange(batch.labels.shape[-1]) / gamma).expand(valid.shape)[valid]
    teacher = rms_norm(batch.teacher[valid], ends.norm, model.config.rms_norm_eps) if soft else None
    losses = head.cross_entropy(hidden[valid].to(dtype), batch.labels[valid], generator, teacher, soft)
    return (losses * weight).sum() / weight.sum()
