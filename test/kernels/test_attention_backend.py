"""The CPU backend inside SGLang's interfaces: same answers as `torch_native`, trees as chains, clear refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from sgl_kernel_ext.reference.attention import paged_attention
from sglang_d3tree.runtime.attention_cpu import create_backend
from sglang_d3tree.tree.layout import VerifyRows

HEADS, KV_HEADS, HEAD_DIM, SLOTS = 6, 2, 16, 256


class Pool:
    """The two buffers of one layer behind the methods that an attention backend calls."""

    swa_layer_nums = 0

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        gen = torch.Generator().manual_seed(1)
        self.dtype = dtype
        self.keys = torch.randn(SLOTS, KV_HEADS, HEAD_DIM, generator=gen).to(dtype)
        self.values = torch.randn(SLOTS, KV_HEADS, HEAD_DIM, generator=gen).to(dtype)

    def set_kv_buffer(self, layer: RadixAttention, location: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        self.keys[location.loc], self.values[location.loc] = k, v

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values


class WindowPool(SWAKVPool):
    """A hybrid pool whose only layer is a sliding-window one, with slots numbered apart from the full pool's."""

    def __init__(self) -> None:
        self.swa_layer_nums = 1
        self.layers_mapping = {0: (0, True)}
        order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(4))
        self.full_to_swa_index_mapping = torch.cat([order, torch.tensor([-1])])
        plain = Pool()
        self.dtype, self.keys, self.values = plain.dtype, torch.empty_like(plain.keys), torch.empty_like(plain.values)
        self.keys[order], self.values[order] = plain.keys, plain.values

    def set_kv_buffer(self, layer: RadixAttention, location: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        self.keys[location.swa_loc], self.values[location.swa_loc] = k, v

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values


def make_runner(dtype: torch.dtype = torch.float32, pool: Any = None) -> Any:
    table = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(2)).view(4, 64).int()
    return SimpleNamespace(
        device="cpu", token_to_kv_pool=pool or Pool(dtype), req_to_token_pool=SimpleNamespace(req_to_token=table)
    )


def make_layer(**options: Any) -> RadixAttention:
    return RadixAttention(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, layer_id=0, **options)


def make_batch(runner: Any, mode: ForwardMode, prefix_lens: list[int], rows: list[int]) -> ForwardBatch:
    """A forward over `rows[r]` new tokens behind `prefix_lens[r]` old ones, the way SGLang describes it."""
    requests = torch.tensor([2, 0, 3][: len(rows)])
    table = runner.req_to_token_pool.req_to_token
    slots = [table[r, p : p + n] for r, p, n in zip(requests.tolist(), prefix_lens, rows, strict=True)]
    prefixes, counts = torch.tensor(prefix_lens), torch.tensor(rows)
    lengths = prefixes if mode.is_target_verify() else prefixes + counts
    batch = ForwardBatch(
        forward_mode=mode,
        batch_size=len(rows),
        input_ids=torch.zeros(sum(rows), dtype=torch.int64),
        req_pool_indices=requests,
        seq_lens=lengths,
        out_cache_loc=torch.cat(slots).long(),
        seq_lens_sum=int(lengths.sum()),
    )
    if not (mode.is_decode() or mode.is_target_verify()):
        batch.extend_prefix_lens, batch.extend_seq_lens = prefixes, counts
    return batch


def qkv(rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slices of one projection, as models hand them over: rows are strided."""
    fused = torch.randn(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM, generator=torch.Generator().manual_seed(3))
    q, k, v = fused.to(dtype).split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], dim=1)
    return q, k.reshape(-1, KV_HEADS, HEAD_DIM), v.reshape(-1, KV_HEADS, HEAD_DIM)


CASES = {
    "decode": (ForwardMode.DECODE, [7, 0, 40], [1, 1, 1]),
    "prefill": (ForwardMode.EXTEND, [0, 0, 0], [5, 33, 1]),
    "prefix hit": (ForwardMode.EXTEND, [9, 0, 31], [5, 20, 1]),
    "mixed": (ForwardMode.MIXED, [3, 12, 40], [11, 1, 1]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [-1, 6])
def test_equals_torch_native(case: str, dtype: torch.dtype, window: int) -> None:
    mode, prefixes, rows = CASES[case]
    layer = make_layer(sliding_window_size=window)
    outputs, pools = [], []
    for factory in (create_backend, TorchNativeAttnBackend):
        runner = make_runner(dtype)
        backend, batch = factory(runner), make_batch(runner, mode, prefixes, rows)
        backend.init_forward_metadata(batch)
        q, k, v = qkv(sum(rows), dtype)
        outputs.append(backend.forward(q.contiguous(), k, v, layer, batch))
        pools.append(runner.token_to_kv_pool)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(*outputs, **tolerance)
    torch.testing.assert_close(pools[0].keys, pools[1].keys, rtol=0, atol=0)
    torch.testing.assert_close(pools[0].values, pools[1].values, rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES)
def test_window_layers_of_a_hybrid_cache_read_their_own_slots(case: str) -> None:
    mode, prefixes, rows = CASES[case]
    layer, outputs = make_layer(sliding_window_size=6), []
    for pool in (Pool(), WindowPool()):
        runner = make_runner(pool=pool)
        backend, batch = create_backend(runner), make_batch(runner, mode, prefixes, rows)
        backend.init_forward_metadata(batch)
        outputs.append(backend.forward(*qkv(sum(rows)), layer, batch))
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


@pytest.mark.parametrize("attn_type", [AttentionType.DECODER, AttentionType.ENCODER_ONLY])
def test_stock_dflash_block(attn_type: AttentionType) -> None:
    """A uniform verify: the target's layers take it as a chain, the draft's see the block both ways."""
    runner = make_runner()
    backend, batch = create_backend(runner), make_batch(runner, ForwardMode.TARGET_VERIFY, [9, 0, 31], [4] * 3)
    batch.spec_info = DFlashVerifyInput(torch.zeros(12), torch.zeros(12), draft_token_num=4)
    backend.init_forward_metadata(batch)
    q, k, v = qkv(12)
    out = backend.forward(q, k, v, make_layer(attn_type=attn_type), batch)
    expected = paged_attention(
        q.reshape(12, HEADS, HEAD_DIM),
        runner.token_to_kv_pool.keys,
        runner.token_to_kv_pool.values,
        runner.req_to_token_pool.req_to_token,
        batch.req_pool_indices,
        batch.seq_lens,
        torch.tensor([0, 4, 8, 12]),
        HEAD_DIM**-0.5,
        "bidirectional" if attn_type == AttentionType.ENCODER_ONLY else "causal",
    )
    torch.testing.assert_close(out.view_as(expected), expected, rtol=1e-5, atol=1e-5)


def verify_rows(counts: list[int], padding: int) -> VerifyRows:
    """Trees in which every node's parent is its predecessor, or the one before that: two interleaved branches."""
    total, widest = sum(counts) + padding, max(counts)
    mask = torch.zeros(total, widest, dtype=torch.bool)
    mask[:, 0] = True
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
    for begin, count in zip(offsets.tolist(), counts, strict=False):
        for row in range(1, count):
            mask[begin + row] |= mask[begin + max(row - 2, 0)]
            mask[begin + row, row] = True
    empty = torch.zeros(total, dtype=torch.int64)
    padded = torch.arange(total) >= sum(counts)
    return VerifyRows(empty, empty, empty, empty, empty, offsets, mask, padded)


class TreeVerify:
    """Stands in for the worker's verify input."""

    draft_token_num = 8

    def __init__(self, rows: VerifyRows | None) -> None:
        self.verify_rows = rows


def test_ragged_trees_give_each_path_what_a_chain_would() -> None:
    """Every root-to-node path, verified alone by `torch_native` as an extend, ends in the node's tree output."""
    counts, padding = [5, 1, 8], 2
    runner = make_runner()
    layout = verify_rows(counts, padding)
    batch = make_batch(runner, ForwardMode.TARGET_VERIFY, [9, 0, 31], counts)
    spare = runner.req_to_token_pool.req_to_token[1, :padding].long()
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, spare])
    batch.spec_info = TreeVerify(layout)
    backend, layer = create_backend(runner), make_layer()
    backend.init_forward_metadata(batch)
    q, k, v = qkv(sum(counts) + padding)
    out = backend.forward(q, k, v, layer, batch)
    assert out[sum(counts) :].eq(0).all()

    offsets = layout.row_offsets.tolist()
    for request, prefix in enumerate([9, 0, 31]):
        for row in range(counts[request]):
            path = offsets[request] + layout.ancestor_mask[offsets[request] + row].nonzero().flatten()
            chain_runner = make_runner()
            chain = make_batch(chain_runner, ForwardMode.EXTEND, [0] * request + [prefix], [0] * request + [len(path)])
            stock = TorchNativeAttnBackend(chain_runner)
            stock.init_forward_metadata(chain)
            expected = stock.forward(q[path].contiguous(), k[path], v[path], layer, chain)
            torch.testing.assert_close(out[path[-1]], expected[-1], rtol=1e-5, atol=1e-5)


def test_idle_is_empty() -> None:
    runner = make_runner()
    backend, batch = create_backend(runner), make_batch(runner, ForwardMode.IDLE, [0], [0])
    backend.init_forward_metadata(batch)
    q, k, v = qkv(0)
    assert backend.forward(q, k, v, make_layer(), batch).shape == (0, HEADS * HEAD_DIM)


@pytest.mark.parametrize(
    ("options", "extras", "sentence"),
    [
        ({"is_cross_attention": True}, {}, "cross attention"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, {}, "decoder_bidirectional"),
        ({"logit_cap": 2.0, "logit_capping_method": "sigmoid"}, {}, "logit capping by sigmoid"),
        ({}, {"sinks": torch.zeros(HEADS)}, "attention with sinks"),
    ],
)
def test_layers_it_cannot_compute_are_refused(options: dict, extras: dict, sentence: str) -> None:
    runner = make_runner()
    backend, batch = create_backend(runner), make_batch(runner, ForwardMode.DECODE, [3], [1])
    backend.init_forward_metadata(batch)
    with pytest.raises(NotImplementedError, match=sentence):
        backend.forward(*qkv(1), make_layer(**options), batch, **extras)


def test_forwards_it_cannot_compute_are_refused() -> None:
    runner = make_runner()
    backend, batch = create_backend(runner), make_batch(runner, ForwardMode.DECODE, [3], [1])
    batch.encoder_lens = torch.tensor([2])
    with pytest.raises(NotImplementedError, match="encoder-decoder"):
        backend.init_forward_metadata(batch)
    batch = make_batch(runner, ForwardMode.TARGET_VERIFY, [3], [1])
    with pytest.raises(NotImplementedError, match="verify batches of NoneType"):
        backend.init_forward_metadata(batch)
    batch.forward_mode = ForwardMode.DLLM_EXTEND
    with pytest.raises(NotImplementedError, match="DLLM_EXTEND"):
        backend.init_forward_metadata(batch)
    with pytest.raises(NotImplementedError, match="KV caches of type"):
        create_backend(make_runner(torch.float8_e4m3fn))
