"""Which requests D3TREE cannot serve yet, and the sentence each gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Refusal(NamedTuple):
    """A request feature that would be answered wrongly, and how to see that a request asks for it."""

    feature: str
    asked: Callable[[Any], bool]


def _sampling(name: str, neutral: Any) -> Callable[[Any], bool]:
    return lambda req: getattr(req.sampling_params, name) != neutral


REFUSALS: tuple[Refusal, ...] = (
    Refusal("log probabilities (logprobs, return_logprob)", lambda req: bool(req.return_logprob)),
    Refusal("return_hidden_states", lambda req: bool(req.return_hidden_states)),
    Refusal("return_sampling_mask", lambda req: bool(req.return_sampling_mask)),
    Refusal("frequency_penalty", _sampling("frequency_penalty", 0.0)),
    Refusal("presence_penalty", _sampling("presence_penalty", 0.0)),
    Refusal("repetition_penalty", _sampling("repetition_penalty", 1.0)),
    Refusal("min_new_tokens (min_tokens)", _sampling("min_new_tokens", 0)),
    Refusal("json_schema (response_format)", _sampling("json_schema", None)),
    Refusal("regex", _sampling("regex", None)),
    Refusal("ebnf", _sampling("ebnf", None)),
    Refusal("structural_tag", _sampling("structural_tag", None)),
    Refusal("custom_logit_processor", lambda req: req.custom_logit_processor is not None),
    Refusal("LoRA adapters", lambda req: req.lora_id is not None),
    # SGLang's seeded sampler stops the scheduler on min_p.
    Refusal(
        "min_p under --enable-deterministic-inference",
        lambda req: req.sampling_params.min_p > 0 and _seeds_count(),
    ),
)


def _seeds_count() -> bool:
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().deterministic.enable_deterministic_inference)


def refusal(req: Any) -> str | None:
    """The sentence for a request that must be answered with 400, or None.

    Args:
        req: SGLang's ``Req`` before it enters the waiting queue, or the ``TokenizedGenerateReqInput`` it is made of.
    """
    features = [row.feature for row in REFUSALS if row.asked(req)]
    if not features:
        return None
    return (
        f"--speculative-algorithm d3tree does not support {', '.join(features)} yet; leave it out of the request, "
        "or serve without speculation."
    )
