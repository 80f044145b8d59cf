"""The drafter we train computes what SGLang's ``DFlashDraftModel`` computes when it serves the checkpoint.

SGLang's own modules run here on the CPU: its weight loader, projections, norms, rotary embedding and context K/V path.
Only the attention kernel call (``RadixAttention``, which needs a paged KV pool) is replaced by a plain softmax over the
context's and the block's keys, with no mask: the draft layers are bidirectional inside the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sglang_d3tree.demo.target import MASK_TOKEN_ID, build_tiny_target
from sglang_d3tree.train import drafter

pytest.importorskip("sglang")


class PlainAttention(torch.nn.Module):
    """Stands in for RadixAttention: softmax over stored context keys and the block's own."""

    def __init__(self, scaling: float, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.scaling, self.shape = scaling, (num_heads, num_kv_heads, head_dim)
        self.context: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        heads, kv_heads, dim = self.shape
        assert self.context is not None
        k, v = (torch.cat(pair).view(-1, kv_heads, dim) for pair in zip(self.context, (k, v), strict=True))
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1).transpose(0, 1) for x in (k, v))
        q = q.reshape(-1, heads, dim).transpose(0, 1)
        weights = (q @ k.transpose(1, 2) * self.scaling).softmax(dim=-1)
        return (weights @ v).transpose(0, 1).flatten(1)


@pytest.fixture
def sglang_context() -> Iterator[None]:
    """SGLang keeps its configuration per process: leave it to the next test as it was."""
    from sglang.srt.runtime_context import get_context, reset_context

    before = get_context()._server_args
    yield
    if before is None:
        reset_context()
    else:
        get_context().set_server_args(before)


def load_into_sglang(checkpoint: Path) -> Any:
    """SGLang's model with the checkpoint's weights, float32, on its portable code paths."""
    from sglang.srt.models.dflash import DFlashDraftModel
    from sglang.srt.runtime_context import get_context
    from sglang.srt.server_args import ServerArgs
    from transformers import AutoConfig

    get_context().set_server_args(ServerArgs(model_path=str(checkpoint), device="cpu"))
    model = DFlashDraftModel(AutoConfig.from_pretrained(checkpoint)).float()
    model.load_weights(load_file(checkpoint / "model.safetensors").items())
    for module in model.modules():
        if hasattr(module, "forward_native") and hasattr(module, "_forward_method"):
            module._forward_method = module.forward_native
    for layer in model.layers:
        attention = layer.self_attn
        attention.use_table_qk_norm_rope = False
        attention.attn = PlainAttention(
            attention.scaling, attention.num_heads, attention.num_kv_heads, attention.head_dim
        )
    return model


def test_block_output_equals_sglang(tmp_path: Path, sglang_context: None) -> None:
    target = build_tiny_target(tmp_path / "target", vocab_size=64, seed=2)
    checkpoint = drafter.init_drafter(target, tmp_path / "drafter", layers=2, block_size=4, seed=5)
    ours = drafter.load_dflash_checkpoint(checkpoint)
    with torch.no_grad():
        for p in ours.parameters():  # norms away from their initial ones
            p.add_(0.1 * torch.randn_like(p))
    drafter.save_dflash_checkpoint(ours, checkpoint, dtype=torch.float32)
    theirs = load_into_sglang(checkpoint)

    prefix, block = 9, 4
    states = torch.randn(prefix, ours.fc.in_features)
    embeds = torch.randn(block, ours.config.hidden_size)
    from sglang.srt.runtime_context import get_parallel

    # One process: its tensor-parallel group is asked for its size only.
    with torch.no_grad(), get_parallel().override(tp_group=SimpleNamespace(world_size=1)):
        features = theirs.project_target_hidden(states)
        for layer in theirs.layers:
            attention = layer.self_attn
            k, v = attention.kv_proj_only(theirs.prepare_context_hidden_for_kv(layer, features))
            k = attention.apply_k_rope(torch.arange(prefix), attention.apply_k_norm(k))
            attention.attn.context = (k, v)
        expected = theirs(None, torch.arange(prefix, prefix + block), None, input_embeds=embeds).hidden_states
        # A state at the anchor's own position must not matter.
        padded = torch.cat([states, torch.randn(2, states.shape[1])])[None]
        actual = ours(embeds[None, None], torch.tensor([[prefix]]), padded)[0, 0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_config_fields_reach_sglang(tmp_path: Path) -> None:
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from transformers import AutoConfig

    target = build_tiny_target(tmp_path / "target", vocab_size=64, seed=2)
    checkpoint = drafter.init_drafter(target, tmp_path / "drafter", layers=2, block_size=6)
    parsed = parse_dflash_draft_config(draft_hf_config=AutoConfig.from_pretrained(checkpoint))
    assert parsed.resolve_block_size() == 6
    assert parsed.resolve_target_layer_ids(target_num_layers=4) == [0, 1, 2]
    assert parsed.mask_token_id == MASK_TOKEN_ID
    assert parsed.num_target_layers == 4
