"""The drafter asked at places of recorded answers, as serving asks it in every round."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from sglang_d3tree.train.answers import Conversation
from sglang_d3tree.train.drafter_blocks import anchor_range, make_blocks
from sglang_d3tree.train.drafter_checkpoint import TargetEnds, load_dflash_checkpoint, load_target_ends
from sglang_d3tree.train.drafter_model import DrafterModel
from sglang_d3tree.train.replay import Drafts, answer_drafts
from sglang_d3tree.train.tower import LanguageTower
from sglang_d3tree.tree.candidates import Candidates, draft_candidates


@dataclass(frozen=True)
class Models:
    """Target and drafter, ready to be asked. dtype: of the drafter's matrix products and the LM head's."""

    tower: LanguageTower
    ends: TargetEnds
    drafter: DrafterModel
    dtype: torch.dtype


def load_models(target_dir: Path, drafter_dir: Path, dtype: torch.dtype) -> Models:
    """Target and drafter with matrices of this type."""
    drafter = load_dflash_checkpoint(drafter_dir).requires_grad_(False)
    ends = load_target_ends(target_dir)
    return Models(LanguageTower(target_dir, drafter.config.target_layer_ids, dtype), ends, drafter, dtype)


@torch.inference_mode()
def draft(
    models: Models, conversation: Conversation, anchors: torch.Tensor, topk: int
) -> tuple[torch.Tensor, Candidates]:
    """Draft states [A, D, H] float32 and candidates at anchors [A] int64, a whole block at each of them."""
    config = models.drafter.config
    batch = make_blocks([conversation], anchors[None], config.block_size, config.mask_token_id)
    with torch.autocast("cpu", models.dtype, enabled=models.dtype != torch.float32):
        block = models.ends.embedding[batch.block_ids]
        hidden = models.drafter(block, batch.anchors, batch.target_hidden)[0, :, 1:].float()
    head = models.tower.head
    return hidden, draft_candidates(F.linear(hidden.to(head.dtype), head).float(), topk)


def draft_answer(models: Models, conversation: Conversation, topk: int) -> Drafts:
    """Drafts at every place of one recorded answer, which needs two tokens at least."""
    span = torch.tensor(list(anchor_range(conversation)))
    states, candidates = draft(models, conversation, span, topk)
    return answer_drafts(torch.tensor(conversation.tokens[conversation.prompt_length :]), states, candidates)
