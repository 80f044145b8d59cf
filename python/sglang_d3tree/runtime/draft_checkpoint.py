"""What a draft checkpoint says about itself, checked against the target before any weight is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sglang_d3tree.runtime.verifiers import check_family

FLAG = "--speculative-draft-model-path"


@dataclass(frozen=True)
class DraftCheckpoint:
    """The facts of a DFlash checkpoint that the worker relies on."""

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]


def read_draft_checkpoint(server_args: Any, record: Any) -> DraftCheckpoint:
    """Read and check the drafter's config.

    Args:
        server_args: the resolving view SGLang hands to an algorithm.
        record: the ServerArgs record behind it.

    Raises:
        ValueError: one sentence naming the flag, for a checkpoint that does not fit the target.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

    path = server_args.speculative_draft_model_path
    config = _load_config(server_args)
    architectures = list(getattr(config, "architectures", None) or [])
    if "DFlashDraftModel" not in architectures:
        raise ValueError(
            f"{FLAG} {path} is not a DFlash drafter: its architectures are {architectures or 'missing'}, expected "
            "['DFlashDraftModel']."
        )
    target_config = model_config_of(record)
    check_family(list(target_config.hf_config.architectures or []))
    target = target_config.hf_text_config
    _check_equal(path, "hidden_size", config.hidden_size, target.hidden_size)
    draft_vocabulary = getattr(config, "vocab_size", None)
    if draft_vocabulary is not None:
        _check_equal(path, "vocab_size", draft_vocabulary, target.vocab_size)

    parsed = parse_dflash_draft_config(draft_hf_config=config)
    layers = tuple(
        parsed.resolve_target_layer_ids(
            target_num_layers=int(target.num_hidden_layers), draft_num_layers=int(parsed.require_num_layers())
        )
    )
    # A layer's output is captured as the next layer's input, so the last one has none.
    if not layers or max(layers) >= target.num_hidden_layers - 1:
        raise ValueError(
            f"{FLAG} {path} reads target layers {list(layers)}, but in a target of {target.num_hidden_layers} layers "
            f"only 0 to {target.num_hidden_layers - 2} can be captured."
        )
    if parsed.mask_token_id is None:
        raise ValueError(
            f"{FLAG} {path} has no dflash_config.mask_token_id in its config.json, so its blocks cannot be built."
        )
    if not 0 <= int(parsed.mask_token_id) < target.vocab_size:
        raise ValueError(
            f"{FLAG} {path} has mask_token_id {parsed.mask_token_id}, outside the target's vocabulary of "
            f"{target.vocab_size}."
        )
    return DraftCheckpoint(_block_size(server_args, parsed, path), int(parsed.mask_token_id), layers)


def _load_config(server_args: Any) -> Any:
    from sglang.srt.utils.hf_transformers_utils import get_config

    path = server_args.speculative_draft_model_path
    try:
        return get_config(
            path,
            trust_remote_code=server_args.trust_remote_code,
            revision=server_args.speculative_draft_model_revision,
            model_override_args=json.loads(server_args.json_model_override_args),
        )
    except Exception as error:
        # Hub clients explain themselves in paragraphs.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{FLAG} {path} has no readable config.json ({reason}).") from error


def _check_equal(path: str, key: str, found: int, expected: int) -> None:
    if int(found) != int(expected):
        raise ValueError(
            f"{FLAG} {path} was made for another target: its {key} is {found}, the target's is {expected}."
        )


def _block_size(server_args: Any, parsed: Any, path: str) -> int:
    given = server_args.speculative_dflash_block_size
    if given is not None:
        flag, block = "--speculative-dflash-block-size", int(given)
    else:
        flag, block = f"{FLAG} {path}: block_size", int(parsed.resolve_block_size(default=16))
    if block < 2:
        raise ValueError(f"{flag} must be at least 2 (the anchor and one drafted token), got {block}.")
    return block
