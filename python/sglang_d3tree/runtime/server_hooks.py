"""Changes to SGLang functions that have no registry of their own; ``plugin.py`` installs them."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from sglang_d3tree import config


def hooks() -> list[Any]:
    """All hooks, as ``plugin.Hook`` rows."""
    from sglang_d3tree.plugin import Hook
    from sglang_d3tree.runtime.images import around_load_image

    state_controller = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
    alias = "sglang.srt.arg_groups.speculative_hook"
    sizing = "sglang.srt.mem_cache.allocation_sizing"
    tokenizer_manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    rows = [
        Hook("sglang.srt.server_args.ServerArgs.add_cli_args", after_add_cli_args, "AFTER", "main"),
        Hook("sglang.srt.server_args.ServerArgs.from_cli_args", after_from_cli_args, "AFTER", "main"),
        Hook(f"{alias}._resolve_speculative_algorithm_alias", around_resolve_algorithm_alias, "AROUND", "main"),
        Hook("sglang.srt.utils.common.load_image", around_load_image, "AROUND", "main"),
        Hook(f"{tokenizer_manager}._create_tokenized_object", before_create_tokenized_object, "BEFORE", "main"),
        Hook(f"{tokenizer_manager}._create_tokenized_object", after_create_tokenized_object, "AFTER", "main"),
        Hook("sglang.srt.entrypoints.engine.Engine._launch_subprocesses", after_launch_subprocesses, "AFTER", "main"),
        Hook("sglang.srt.managers.scheduler.validate_dflash_request", after_validate_request, "AFTER", "scheduler"),
        Hook(f"{sizing}.get_req_to_token_extra_context_len", after_extra_context_len, "AFTER", "scheduler"),
        Hook(f"{state_controller}._update_handlers", after_update_handlers, "AFTER", "scheduler"),
        Hook(f"{state_controller}._add_speculative", after_add_speculative, "AFTER", "scheduler"),
    ]
    if _on_cpu_platform():
        from sglang_d3tree.runtime.seeds_cpu import murmur_hash32
        from sglang_d3tree.runtime.slots import assign_req_to_token, last_slots

        allocation = "sglang.srt.mem_cache.allocation"
        runner = "sglang.srt.model_executor.model_runner.ModelRunner"
        updater = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
        rows += [
            Hook(f"{allocation}.assign_req_to_token_pool_func", assign_req_to_token, "REPLACE", "scheduler"),
            Hook(f"{allocation}.get_last_loc", last_slots, "REPLACE", "scheduler"),
            Hook("sglang.srt.layers.sampler.murmur_hash32", murmur_hash32, "REPLACE", "scheduler"),
            Hook(f"{updater}.update_weights_from_tensor", after_update_weights, "AFTER", "scheduler"),
            Hook(f"{runner}.maybe_enable_batch_invariant_mode", skip_batch_invariant_kernels, "REPLACE", "scheduler"),
        ]
    return rows


def _on_cpu_platform() -> bool:
    from sglang.srt.platforms import current_platform

    from sglang_d3tree.platform import PortableCpuPlatform

    return isinstance(current_platform, PortableCpuPlatform)


def after_add_cli_args(result: Any, parser: argparse.ArgumentParser) -> None:
    """``--help`` and parsing know our flags."""
    config.add_cli_args(parser)


def after_from_cli_args(server_args: Any, *args: Any) -> Any:
    """Carry our flags on the record; SGLang keeps only its own fields."""
    namespace = next(arg for arg in args if isinstance(arg, argparse.Namespace))
    config.remember(server_args, config.take_from_namespace(namespace))
    return server_args


def server_args_from_keywords(**kwargs: Any) -> Any:
    """``sglang.Engine(speculative_d3tree_policy=...)``: our keywords next to SGLang's."""
    from sglang.srt.server_args import ServerArgs

    given = config.take_from_keywords(kwargs)
    server_args = ServerArgs(**kwargs)
    config.remember(server_args, given)
    return server_args


def around_resolve_algorithm_alias(original: Any, algorithm: str | None, *args: Any, **kwargs: Any) -> str | None:
    """SGLang opens the drafter to guess an alias; a missing one would fail there without naming the flag."""
    from sglang_d3tree.runtime.algorithm import ALGORITHM

    if algorithm == ALGORITHM:
        return algorithm
    result: str | None = original(algorithm, *args, **kwargs)
    return result


def before_create_tokenized_object(
    manager: Any,
    obj: Any,
    input_text: Any,
    input_ids: Any,
    input_embeds: Any = None,
    mm_inputs: Any = None,
    token_type_ids: Any = None,
) -> None:
    """Answer 400 to a request whose images would be left out."""
    from sglang_d3tree.runtime.images import check_images_used

    # Elsewhere there are model families whose processors this package has never seen.
    if _serving_d3tree() or _on_cpu_platform():
        check_images_used(obj.image_data, mm_inputs)


def after_create_tokenized_object(tokenized: Any, *args: Any) -> None:
    """Answer 400 to what D3TREE cannot do yet before a stream has begun with 200; the scheduler checks again."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

    from sglang_d3tree.runtime.requests import refusal

    sentence = refusal(tokenized) if _serving_d3tree() and isinstance(tokenized, TokenizedGenerateReqInput) else None
    if sentence is not None:
        raise ValueError(sentence)


def after_launch_subprocesses(result: Any, *args: Any, **kwargs: Any) -> None:
    """The HTTP server, where there is one, gets our route before it starts to listen."""
    http_server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if http_server is not None and _serving_d3tree():
        from sglang_d3tree.runtime.http_routes import add_routes

        add_routes(http_server)


def skip_batch_invariant_kernels(runner: Any) -> None:
    """``--enable-deterministic-inference`` on CPU: seeds count, torch's own matrix products stay.

    The batch-invariant ones that SGLang would install are Triton kernels, and asking for them ends the start-up.
    """


def after_update_weights(result: Any, updater: Any, *args: Any, **kwargs: Any) -> Any:
    """The packed copies of the weights follow loaders that do not go through the model's ``load_weights``."""
    from sglang_d3tree.runtime.linear_cpu import repack_model

    repack_model(updater.get_model())
    return result


def after_validate_request(result: str | None, req: Any, enable_overlap: bool) -> str | None:
    """Answer 400 to what D3TREE cannot do yet, instead of a wrong answer."""
    from sglang_d3tree.runtime.requests import refusal

    return result or (refusal(req) if _serving_d3tree() else None)


def after_extra_context_len(extra: int) -> int:
    """Room in a request's row of the slot table for what a round reserves past the last position of the context.

    SGLang reserves twice the verify width but, with pages of one token, leaves room for one width only, so a request
    that reaches the end of its context would write past its row.
    """
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size, get_alloc_reserve_per_decode

    return max(extra, get_alloc_reserve_per_decode() + get_alloc_page_size()) if _serving_d3tree() else extra


def _serving_d3tree() -> bool:
    from sglang.srt.runtime_context import get_spec

    from sglang_d3tree.runtime.algorithm import ALGORITHM

    return get_spec().speculative_algorithm == ALGORITHM


def after_update_handlers(handlers: dict[str, Any], controller: Any) -> dict[str, Any]:
    """``/set_internal_state`` accepts the options that may change on a running server."""
    from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected, _UpdateHandler

    if not _serving_d3tree():
        return handlers
    worker = controller.scheduler.draft_worker

    by_keyword = {option.keyword: option for option in config.OPTIONS if option.runtime}

    def validate(key: str, value: Any) -> None:
        try:
            by_keyword[key].from_wire(value)
        except ValueError as error:
            raise UpdateRejected(str(error)) from error

    def apply(key: str, value: Any) -> None:
        worker.set_options(**{by_keyword[key].name: by_keyword[key].from_wire(value)})

    return handlers | {keyword: _UpdateHandler(validate, apply) for keyword in by_keyword}


def after_add_speculative(result: Any, controller: Any, state: dict[str, Any]) -> None:
    """``/server_info`` shows the options in force and what the rounds did."""
    if _serving_d3tree():
        state["d3tree"] = controller.scheduler.draft_worker.describe()
