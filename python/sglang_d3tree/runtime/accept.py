"""From the target's logits to the accepted path, with the request's own sampling parameters."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_d3tree.tree.accept import Walk, accept_greedy, advance, start_walk
from sglang_d3tree.tree.layout import VerifyRows


def accept(
    logits: torch.Tensor, sampling_info: Any, sampler: Any, rows: VerifyRows, horizon: int, prefix_lens: torch.Tensor
) -> Walk:
    """Walk every request's tree with the target's own next tokens (METHOD 6).

    Args:
        logits: [T, V], the target's raw logits after every verify row.
        sampling_info: SGLang's ``SamplingBatchInfo`` of the R requests.
        sampler: the target runner's ``Sampler``; drawing through it makes every emitted token a sample of exactly
            the distribution that plain decoding uses, seeds included.
        horizon: greatest number of nodes a walk can accept.
        prefix_lens: [R] committed tokens before this round.
    """
    if _is_greedy(sampling_info):
        return accept_greedy(rows, logits.argmax(dim=-1), horizon)
    walk = start_walk(rows, horizon)
    for step in range(horizon + 1):
        walk = advance(rows, walk, _draw(logits, sampling_info, sampler, walk, prefix_lens + step), step)
        # On CPU the flag is at hand; on a device asking would stall the host.
        if logits.device.type == "cpu" and not walk.alive.any():
            break
    return walk


def _is_greedy(sampling_info: Any) -> bool:
    return sampling_info.is_all_greedy and sampling_info.logit_bias is None


def _draw(
    logits: torch.Tensor, sampling_info: Any, sampler: Any, walk: Walk, positions: torch.Tensor
) -> torch.Tensor:
    """[R] int64, the target's next token at the row each walk has reached."""
    here = logits[walk.row].float()
    if sampling_info.logit_bias is not None:
        here = here + sampling_info.logit_bias
    tokens = sampler(
        LogitsProcessorOutput(next_token_logits=here),
        sampling_info,
        return_logprob=False,
        top_logprobs_nums=[],
        token_ids_logprobs=[],
        positions=positions,
    )
    return tokens.to(torch.int64)
