"""CPU attention backend: prefill, decode and tree verify through one batched kernel call per layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from sgl_kernel_ext.cpu import attention_ops
from sgl_kernel_ext.dispatch import get_kernel
from sgl_kernel_ext.reference.attention import AttentionMode
from sglang_d3tree.runtime.kv_pool_cpu import CpuMHATokenToKVPool

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_d3tree.tree.layout import VerifyRows

BACKEND_NAME = "d3tree_cpu"

_PREFILL_MODES = (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL)
_KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@runtime_checkable
class RaggedVerify(Protocol):
    """What the backend reads from the worker's verify input."""

    draft_token_num: int
    verify_rows: VerifyRows | None


@dataclass(frozen=True)
class AttentionRows:
    """How the rows of one forward map to requests, built once and read by every layer.

    Attributes:
        slot_table: [*, L] position -> slot of the full-attention KV buffers.
        req_rows: [R] int64, the table row of each request.
        prefix_lens: [R] int64, keys in front of the request's rows.
        row_offsets: [R + 1] int64.
        ancestor_mask: bool [T, N], or None where the rows of a request form a chain.
        window_slot_table: [R, L'] slots of the sliding-window KV buffers by request; None without them.
        window_req_rows: [R] int64, rows of `window_slot_table`; None without it.
        window_write_slots: [T] where this forward's rows go in those buffers; None without them.
    """

    slot_table: torch.Tensor
    req_rows: torch.Tensor
    prefix_lens: torch.Tensor
    row_offsets: torch.Tensor
    ancestor_mask: torch.Tensor | None = None
    window_slot_table: torch.Tensor | None = None
    window_req_rows: torch.Tensor | None = None
    window_write_slots: torch.Tensor | None = None


class D3TreeCpuAttnBackend(AttentionBackend):
    """Attention on CPU for target and draft models, tree verify included.

    Raises:
        NotImplementedError: at construction for KV caches, at a forward for layers or modes, that the kernel
            does not compute; the sentence says which, and that torch_native may serve instead.
    """

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        self.device = model_runner.device
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.forward_metadata: AttentionRows | None = None
        self._paged_attention = get_kernel("paged_attention", "cpu")

        pool = self.token_to_kv_pool
        if isinstance(pool, MLATokenToKVPool):
            raise _unsupported("latent (MLA) KV caches")
        if pool.dtype not in _KV_DTYPES:
            raise _unsupported(f"KV caches of type {pool.dtype}")
        # A missing compiler should warn, and a slow one should make wait, at start-up rather than at a request.
        attention_ops()
        self._window_pool = pool if isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0 else None

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Lay out the rows of this forward; layers then call the kernel without touching the batch again."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = None
            return
        if forward_batch.encoder_lens is not None:
            raise _unsupported("encoder-decoder models")

        ancestor_mask = None
        if mode.is_decode():
            prefix_lens = forward_batch.seq_lens - 1
            row_offsets = _uniform_offsets(forward_batch.batch_size, 1)
        elif mode.is_target_verify():
            prefix_lens = forward_batch.seq_lens
            row_offsets, ancestor_mask = _verify_layout(forward_batch)
        elif mode in _PREFILL_MODES:
            assert forward_batch.extend_prefix_lens is not None and forward_batch.extend_seq_lens is not None
            prefix_lens = forward_batch.extend_prefix_lens
            row_offsets = _ragged_offsets(forward_batch.extend_seq_lens)
        else:
            raise _unsupported(f"forward mode {mode.name}")

        rows = AttentionRows(
            slot_table=self.req_to_token_pool.req_to_token,
            req_rows=_as_index(forward_batch.req_pool_indices),
            prefix_lens=_as_index(prefix_lens),
            row_offsets=_as_index(row_offsets),
            ancestor_mask=ancestor_mask,
        )
        if self._window_pool is not None:
            rows = self._with_window_slots(rows, forward_batch)
        self.forward_metadata = rows

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of one layer for every mode.

        Args:
            q: [T, Hq * Dh] or [T, Hq, Dh].
            k, v: [T, Hkv, Dh] and [T, Hkv, Dv] of the same rows; None if the layer reads another's cache.

        Returns:
            [T, Hq * Dv] in q's dtype.
        """
        _check_layer(layer, kwargs)
        rows = self._rows()
        if save_kv_cache and k is not None and v is not None:
            location = KVWriteLoc.for_batch(forward_batch, swa_loc=rows.window_write_slots)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
        return self.attend(layer, q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim))

    forward_decode = forward_extend

    def attend(self, layer: RadixAttention, q: torch.Tensor) -> torch.Tensor:
        """Attention over what the cache holds, this forward's rows included.

        Args:
            q: [T, Hq, Dh].

        Returns:
            [T, Hq * Dv] in q's dtype.
        """
        rows = self._rows()
        slot_table, req_rows = rows.slot_table, rows.req_rows
        if self._window_pool is not None and self._window_pool.layers_mapping[layer.layer_id][1]:
            assert rows.window_slot_table is not None and rows.window_req_rows is not None
            slot_table, req_rows = rows.window_slot_table, rows.window_req_rows

        mode, ancestor_mask = _layer_mode(layer, rows)
        out = self._paged_attention(
            q,
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            slot_table,
            req_rows,
            rows.prefix_lens,
            rows.row_offsets,
            layer.scaling,
            mode,
            ancestor_mask,
            layer.logit_cap,
            layer.sliding_window_size,
        )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _rows(self) -> AttentionRows:
        assert self.forward_metadata is not None, "init_forward_metadata must run before the layers"
        return self.forward_metadata

    def takes_rows_of(self, dtype: torch.dtype) -> bool:
        """Whether K and V rows of this type go into the cache as they are, at the slots that a batch names."""
        pool = self.token_to_kv_pool
        return type(pool) is CpuMHATokenToKVPool and pool.holds_rows_of(dtype)

    def kv_buffers(self, layer: RadixAttention) -> tuple[torch.Tensor, torch.Tensor]:
        """[slots, Hkv, Dh] and [slots, Hkv, Dv] of one layer."""
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        return keys, values

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of a padding request: one token, so that its single decode row has an empty prefix."""
        return 1

    def support_triton(self) -> bool:
        return False

    def _with_window_slots(self, rows: AttentionRows, forward_batch: ForwardBatch) -> AttentionRows:
        """Add the sliding-window pool's slots, which SGLang numbers apart from the full pool's."""
        assert self._window_pool is not None
        lengths = rows.prefix_lens + rows.row_offsets.diff()
        longest = int(lengths.max()) if lengths.numel() > 0 else 0
        full_slots = rows.slot_table[rows.req_rows, :longest].long()
        return AttentionRows(
            slot_table=rows.slot_table,
            req_rows=rows.req_rows,
            prefix_lens=rows.prefix_lens,
            row_offsets=rows.row_offsets,
            ancestor_mask=rows.ancestor_mask,
            window_slot_table=self._window_pool.translate_loc_from_full_to_swa(full_slots),
            window_req_rows=torch.arange(rows.req_rows.numel()),
            window_write_slots=self._window_pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc),
        )


def create_backend(runner: ModelRunner) -> D3TreeCpuAttnBackend:
    """Factory for SGLang's `register_attention_backend`."""
    return D3TreeCpuAttnBackend(runner)


def _verify_layout(forward_batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Row offsets [R + 1] and ancestor mask (None: chains) of a TARGET_VERIFY forward."""
    spec_info = forward_batch.spec_info
    if isinstance(spec_info, RaggedVerify) and spec_info.verify_rows is not None:
        return spec_info.verify_rows.row_offsets, spec_info.verify_rows.ancestor_mask
    if isinstance(spec_info, RaggedVerify | DFlashVerifyInput):
        return _uniform_offsets(forward_batch.batch_size, spec_info.draft_token_num), None
    raise _unsupported(f"verify batches of {type(spec_info).__name__}")


def _layer_mode(layer: RadixAttention, rows: AttentionRows) -> tuple[AttentionMode, torch.Tensor | None]:
    if layer.attn_type == AttentionType.ENCODER_ONLY:
        return "bidirectional", None
    if rows.ancestor_mask is not None:
        return "tree", rows.ancestor_mask
    return "causal", None


def _check_layer(layer: RadixAttention, extras: dict[str, Any]) -> None:
    """Refuse what the kernel would otherwise compute wrongly without a word."""
    if layer.is_cross_attention:
        raise _unsupported("cross attention")
    if layer.attn_type == AttentionType.DECODER_BIDIRECTIONAL:
        raise _unsupported("prompts whose tokens see each other both ways (decoder_bidirectional)")
    if layer.logit_cap > 0 and layer.logit_capping_method != "tanh":
        raise _unsupported(f"logit capping by {layer.logit_capping_method}")
    if layer.xai_temperature_len > 0:
        raise _unsupported("attention temperatures by position")
    for name, value in extras.items():
        if value is not None:
            raise _unsupported(f"attention with {name}")


def _unsupported(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"The attention backend {BACKEND_NAME} does not support {what}; "
        "try --attention-backend torch_native, which has no tree verify."
    )


def _uniform_offsets(requests: int, rows: int) -> torch.Tensor:
    return torch.arange(0, (requests + 1) * rows, rows)


def _ragged_offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int64), (1, 0))


def _as_index(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.int64).contiguous()
