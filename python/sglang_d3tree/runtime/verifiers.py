"""What each target family needs: embedding, LM head, node positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_d3tree.tree.layout import VerifyRows


def _capture_in_decoder(model: Any, layer_ids: list[int]) -> None:
    """Capture the outputs of ``layer_ids`` in a model whose decoder collects the *inputs* of ``layers_to_capture``."""
    model.capture_aux_hidden_states = True
    model.model.layers_to_capture = [layer_id + 1 for layer_id in layer_ids]


# Architecture of the target -> how its language tower is told which hidden states to hand out; None where SGLang's
# own class knows (`set_dflash_layers_to_capture`).
VERIFIERS: dict[str, Callable[[Any, list[int]], None] | None] = {
    "Qwen2_5_VLForConditionalGeneration": _capture_in_decoder,
    "Qwen3VLForConditionalGeneration": None,
    "Qwen3ForCausalLM": None,
    "LlamaForCausalLM": None,
}


def prepare_capture(model: Any) -> None:
    """Give a loaded target the capture method that SGLang calls when it sets up attention."""
    capture = VERIFIERS[type(model).__name__]
    if capture is not None:
        type(model).set_dflash_layers_to_capture = capture


def check_family(architectures: list[str], flag: str = "--model-path") -> None:
    """Refuse a target whose capture and positions nobody has checked.

    Raises:
        ValueError: listing the known families.
    """
    if not any(name in VERIFIERS for name in architectures):
        raise ValueError(
            f"{flag} has architecture {', '.join(architectures)}, which D3TREE cannot verify with; known: "
            f"{', '.join(VERIFIERS)}."
        )


@dataclass(frozen=True)
class TargetParts:
    """The target's own embedding and LM head, which the drafter borrows.

    embed: token ids [T] int64 -> [T, H]; logits: hidden states [..., H] -> [..., V], V being vocabulary. token_map
    [V] int64 says which token a logit belongs to where the drafter knows a part of the vocabulary; None: all of it.
    """

    embed: Callable[[torch.Tensor], torch.Tensor]
    logits: Callable[[torch.Tensor], torch.Tensor]
    vocabulary: int
    token_map: torch.Tensor | None = None


def target_parts(target_model: Any, draft_model: Any, token_map: torch.Tensor | None = None) -> TargetParts:
    """Look up embedding and head of a loaded target; token_map [n] int64 reduces the head to those rows, copied.

    Raises:
        RuntimeError: when the head is not a dense matrix, which the candidate extraction needs.
    """
    from sglang.srt.speculative.dflash_utils import is_dense_head_weight
    from sglang.srt.speculative.dflash_worker_v2 import _resolve_dflash_embedding_module

    from sglang_d3tree.runtime.linear_cpu import head_product

    embedding = _resolve_dflash_embedding_module(draft_model, target_model)
    head = target_model.lm_head
    if not is_dense_head_weight(head.weight):
        raise RuntimeError("D3TREE needs a dense LM head in the target; quantised heads are not supported yet.")
    # Rows past the original vocabulary are padding.
    weight = head.weight[: head.org_vocab_size]
    if token_map is not None:
        token_map = token_map.to(weight.device)
        weight = weight[token_map].contiguous()

    product = head_product(head, weight)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        # The drafted positions are a slice of their blocks; torch multiplies such a tensor batch by batch, on a CPU
        # twenty times slower than the same rows lying together.
        rows = hidden.to(weight.dtype).reshape(-1, hidden.shape[-1])
        return product(rows).view(*hidden.shape[:-1], -1)

    return TargetParts(embedding, logits, weight.shape[0], token_map)


def verify_positions(
    runner: Any, batch: Any, rows: VerifyRows, positions: torch.Tensor
) -> torch.Tensor | None:
    """M-RoPE positions of the verify rows [3, T] int64, or None for a target without M-RoPE.

    A text token after an image sits at its sequence index plus the image's offset, on all three axes alike, so a
    node's position is the sequence index of its depth plus its request's offset.
    """
    if not runner.model_config.model_is_mrope:
        return None
    offsets = [0 if item is None else int(item.mrope_position_delta) for item in batch.multimodal_inputs]
    if any(offsets):
        # Host to device only: the offsets are known since prefill.
        shift = torch.tensor(offsets, dtype=torch.int64).to(positions.device, non_blocking=True)
        positions = positions + torch.where(rows.is_padding, 0, shift[rows.request])
    return positions.unsqueeze(0).expand(3, -1)
