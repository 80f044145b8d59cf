"""The KV pool of the CPU platform: SGLang's MHA pool without the Triton kernels it warms up."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sgl_kernel_ext.dispatch import get_kernel

_store_kv = get_kernel("store_kv", "cpu")
_compact_kv = get_kernel("compact_kv", "cpu")


class CpuMHATokenToKVPool(MHATokenToKVPool):
    """MHA pool whose KV writes and moves are one kernel call each."""

    def _init_kv_copy_and_warmup(self) -> None:
        # The stock method compiles and launches a Triton copy kernel, which needs a GPU.
        self._kv_copy_config = None
        self.use_native_move_kv_cache = True

    def holds_rows_of(self, dtype: torch.dtype) -> bool:
        """Whether K and V of this type are stored as they are, one slot behind the other."""
        plain = self.dtype == self.store_dtype == dtype
        return plain and not (self.is_quantized_kv_cache or self.use_hnd or self.requires_physical_write_loc)

    def _store_kv_layer(self, layer_idx: int, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        keys, values = self.k_buffer[layer_idx], self.v_buffer[layer_idx]
        if cache_k.dtype == cache_v.dtype == keys.dtype and cache_k.dim() == keys.dim() == 3:
            _store_kv(cache_k, cache_v, keys, values, loc.long())
        else:
            super()._store_kv_layer(layer_idx, loc, cache_k, cache_v)

    def _move_kv_cache_impl(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        if not self.holds_rows_of(self.dtype):
            super()._move_kv_cache_impl(tgt_loc, src_loc)
            return
        _compact_kv([*self.k_buffer, *self.v_buffer], tgt_loc.long(), src_loc.long())
