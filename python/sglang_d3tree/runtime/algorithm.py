"""The algorithm as SGLang's scheduler knows it, and what it does to the server's arguments."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_d3tree.config import D3TreeOptions, options_of

ALGORITHM = "D3TREE"


def worker_class(server_args: Any) -> type:
    """Factory that SGLang calls in the scheduler process."""
    from sglang_d3tree.runtime.worker import D3TreeWorker

    return D3TreeWorker


class D3TreeAlgorithm(CustomSpecAlgo):
    """Takes SGLang's DFLASH branches (target hidden-state capture, draft KV pool, accept bookkeeping)."""

    def is_dflash(self) -> bool:
        return True

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_prefill_shared_read_done(self) -> bool:
        return True

    # The next three are asked of any algorithm but missing from CustomSpecAlgo.

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def create_future_map(
        self,
        device: torch.device,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def handle_server_args(self, server_args: Any) -> None:
        """Validate the flags and the draft checkpoint, then set the fields SGLang sizes its buffers by.

        Raises:
            ValueError: one sentence that names the flag and the fix.
        """
        from sglang_d3tree.runtime.draft_checkpoint import read_draft_checkpoint
        from sglang_d3tree.runtime.tree_head import read_head

        _refuse_unsupported(server_args)
        options = options_of(_record(server_args))
        if server_args.speculative_draft_model_path is None:
            raise ValueError("D3TREE needs a DFlash drafter: set --speculative-draft-model-path.")
        checkpoint = read_draft_checkpoint(server_args, _record(server_args))
        _check_files(server_args, options, _record(server_args))
        read_head(options.head, server_args.speculative_draft_model_path, server_args.model_path)
        server_args.speculative_num_steps = 1
        server_args.speculative_eagle_topk = 1
        server_args.speculative_dflash_block_size = checkpoint.block_size
        server_args.speculative_num_draft_tokens = window_width(options, checkpoint.block_size)
        if server_args.speculative_draft_attention_backend is None:
            server_args.speculative_draft_attention_backend = _attention_backend(server_args)
        server_args.enable_mixed_chunk = False


def window_width(options: D3TreeOptions, block_size: int) -> int:
    """KV slots a request needs past its prefix in one round: its verify rows or its draft block.

    SGLang calls this number ``speculative_num_draft_tokens`` and reserves twice as many slots.
    """
    return max(options.max_rows, block_size)


def _check_files(server_args: Any, options: D3TreeOptions, record: Any) -> None:
    """Read once, before any weight is loaded, what the worker will read."""
    from pathlib import Path

    from sglang.srt.arg_groups.model_override_base import model_config_of

    from sglang_d3tree.policy.cost import CostProfile
    from sglang_d3tree.runtime.token_map import read_token_map

    if options.cost_profile not in ("auto", "none"):
        CostProfile.load(Path(options.cost_profile))
    vocabulary = model_config_of(record).hf_text_config.vocab_size
    read_token_map(server_args.speculative_token_map, server_args.speculative_draft_model_path, vocabulary)


def _record(server_args: Any) -> Any:
    from sglang.srt.arg_groups.model_override_base import record_of

    return record_of(object.__getattribute__(server_args, "_cfg"))


def _attention_backend(server_args: Any) -> str:
    from sglang.srt.platforms import current_platform

    return server_args.attention_backend or current_platform.get_default_attention_backend()


def _refuse_unsupported(server_args: Any) -> None:
    """Every combination that would give a wrong answer or fail later, with a sentence now."""
    from sglang_d3tree.platform import ATTENTION_BACKEND

    if server_args.device != "cpu":
        raise ValueError(
            f"D3TREE cannot verify trees on --device {server_args.device} yet: the masked ragged verify exists "
            f"for the CPU backend '{ATTENTION_BACKEND}' only. Use --device cpu, or --speculative-algorithm dflash."
        )
    for flag in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        backend = getattr(server_args, flag)
        if backend not in (None, ATTENTION_BACKEND):
            raise ValueError(
                f"--{flag.replace('_', '-')} {backend} cannot verify a draft tree; backends that can: "
                f"{ATTENTION_BACKEND}."
            )
    if server_args.pp_size != 1:
        raise ValueError(f"D3TREE supports --pp-size 1 only, got {server_args.pp_size}.")
    if server_args.enable_lora or server_args.lora_paths:
        raise ValueError("D3TREE does not serve LoRA adapters yet: leave out --enable-lora and --lora-paths.")
    if server_args.disaggregation_mode != "null":
        raise ValueError(
            "D3TREE does not support prefill/decode disaggregation: leave out --disaggregation-mode "
            f"{server_args.disaggregation_mode}."
        )
    if server_args.enable_hierarchical_cache:
        raise ValueError("D3TREE does not support --enable-hierarchical-cache yet.")
    if server_args.speculative_draft_window_size is not None:
        raise ValueError("D3TREE reads the whole draft context: leave out --speculative-draft-window-size.")
