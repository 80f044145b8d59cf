"""A CPU platform that lets SGLang's PyPI wheels serve on a machine without an accelerator.

SGLang asks ``activate`` (entry point ``sglang.srt.platforms``) for a platform class. It steps aside wherever
something better is there: an accelerator, another platform plugin, or SGLang's own CPU engine.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import entry_points
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import KVPoolKind, PlatformCapabilities, PlatformEnum, SRTPlatform

from sglang_d3tree.machine import has_feature

logger = logging.getLogger(__name__)

PLATFORM_GROUP = "sglang.srt.platforms"
ENTRY_POINT_NAME = "d3tree_cpu"
ATTENTION_BACKEND = "d3tree_cpu"
# Under this name SGLang looks for the platform's own layer operations.
DISPATCH_KEY = "d3tree_cpu"

# Share of the memory that is free at start-up which the KV cache may take, and its ceiling in tokens. A CPU
# box runs other things too, and page-touching a huge pool makes start-up slow.
_KV_MEMORY_SHARE = 0.2
_KV_MAX_TOKENS = 131072


def activate() -> str | None:
    """The platform class to use, or None to step aside."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    if _accelerator_present() or _another_platform_active():
        return None
    return f"{__name__}:PortableCpuPlatform"


def _accelerator_present() -> bool:
    if torch.cuda.is_available() or torch.xpu.is_available() or torch.mps.is_available():
        return True
    # NPU and MUSA builds of torch add their own namespaces.
    return any(getattr(torch, name, None) is not None for name in ("npu", "musa"))


def _another_platform_active() -> bool:
    for entry in entry_points(group=PLATFORM_GROUP):
        if entry.name == ENTRY_POINT_NAME:
            continue
        try:
            if entry.load()() is not None:
                return True
        except Exception:
            # SGLang reports a broken plugin itself; it is not an active platform.
            logger.debug("Platform plugin %s could not be asked", entry.name, exc_info=True)
    return False


class PortableCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Out-of-tree CPU platform: torch kernels and the backend of ``runtime/attention_cpu.py``."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Sane values for everything the user left open; a given flag is never overridden."""
        given = _record(server_args)
        # By now SGLang has filled in the backend of its own CPU engine, so only the record tells what was given.
        if given.attention_backend is None:
            server_args.attention_backend = ATTENTION_BACKEND
        if server_args.dtype == "auto" and not _cpu_multiplies_bfloat16():
            # Without bf16 dot products the matmuls emulate the type and run slower than float32.
            server_args.dtype = "float32"
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = _kv_tokens(server_args)
        if server_args.max_running_requests is None:
            server_args.max_running_requests = 64
        # Streams do nothing on CPU, so overlapping only adds a round of latency.
        if os.environ.get("SGLANG_D3TREE_CPU_OVERLAP", "0") != "1":
            server_args.disable_overlap_schedule = True
        # An idle scheduler would spin on a core that the next request needs.
        server_args.sleep_on_idle = True
        if server_args.sampling_backend is None:
            server_args.sampling_backend = "pytorch"

    def get_device(self, device_id: int = 0) -> str:
        # Resolution treats the answer as the text of --device; the mixin's torch.device breaks it.
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm.upper() in ("D3TREE", "DFLASH")

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == ATTENTION_BACKEND

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        if kind != "mha":
            return None
        from sglang_d3tree.runtime.kv_pool_cpu import CpuMHATokenToKVPool

        return CpuMHATokenToKVPool

    def get_speculative_cache_locs_fn(self) -> Any:
        from sglang_d3tree.runtime.slots import extend_cache_locs

        return extend_cache_locs

    def init_backend(self) -> None:
        """Runs in every worker process before the model is built."""
        # SGLang compiles a few small functions (rotary embedding among them) on first use: half a minute of C++
        # compilation per process, and a failure where no compiler is, to save microseconds.
        torch.compiler.set_stance("force_eager")
        from sglang_d3tree.runtime.layers_cpu import register_layers

        register_layers(DISPATCH_KEY)
        if "OMP_NUM_THREADS" not in os.environ:
            # Containers often show more cores to OpenMP than the scheduler lets a process use.
            torch.set_num_threads(len(os.sched_getaffinity(0)))

    def get_dispatch_key_name(self) -> str:
        # A name of our own: "cpu" would select SGLang's kernels for its own CPU engine.
        return DISPATCH_KEY

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Runs for target and drafter alike: packed weights, and the short loop where a stack is one it knows."""
        from sglang_d3tree.runtime.decoder_cpu import install
        from sglang_d3tree.runtime.linear_cpu import pack_model

        pack_model(model, amx=has_feature("amx_bf16"))
        install(model)


def _cpu_multiplies_bfloat16() -> bool:
    """Whether the CPU has bfloat16 dot products (AVX512_BF16, AMX or the Arm equivalent)."""
    return has_feature("avx512_bf16", "amx_bf16", " bf16")


def _kv_tokens(server_args: Any) -> int:
    """KV cache capacity in tokens that fits the share of free memory set aside for it."""
    import psutil
    from sglang.srt.arg_groups.model_override_base import model_config_of

    config = model_config_of(_record(server_args))
    bytes_per_value = 4 if server_args.dtype in ("float32", "float") else 2
    per_token = (
        2 * config.num_hidden_layers * config.get_num_kv_heads(1) * config.head_dim * bytes_per_value
    )
    budget = psutil.virtual_memory().available * _KV_MEMORY_SHARE
    return int(max(2048, min(_KV_MAX_TOKENS, budget // max(per_token, 1))))


def _record(server_args: Any) -> Any:
    """The ServerArgs record, as the user gave it, behind the stand-in that SGLang hands to a platform."""
    from sglang.srt.arg_groups.model_override_base import record_of

    return record_of(object.__getattribute__(server_args, "_cfg"))
