"""The KV pool of the CPU platform: SGLang's MHA pool without the Triton kernels it warms up."""

from __future__ import annotations

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class CpuMHATokenToKVPool(MHATokenToKVPool):
    """MHA pool whose KV moves are plain tensor indexing."""

    def _init_kv_copy_and_warmup(self) -> None:
        # The stock method compiles and launches a Triton copy kernel, which needs a GPU.
        self._kv_copy_config = None
        self.use_native_move_kv_cache = True
