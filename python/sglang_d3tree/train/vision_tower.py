"""The vision tower as training needs it: one batched forward for square images of one size.

The weights live in transformers' own module, so names and shapes are the checkpoint's; only the forward is ours, since
theirs loops over images. A test holds one against the other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

PATCH, TEMPORAL, MERGE = 14, 2, 2
# Qwen's image processor normalises with CLIP's statistics.
_MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(1, 3, 1, 1)
_STD = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(1, 3, 1, 1)


def build_tower(checkpoint: Path, seed: int) -> Any:
    """A fresh tower of the shape that the checkpoint's config.json asks for."""
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    config = Qwen2_5_VLConfig.from_pretrained(checkpoint).vision_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tower = Qwen2_5_VisionTransformerPretrainedModel(config).float()
        # Their 0.02 everywhere leaves a narrow tower almost silent; scale every matrix to its fan-in instead.
        with torch.no_grad():
            for parameter in tower.parameters():
                if parameter.ndim >= 2:
                    fan_in = parameter[0].numel()
                    parameter.normal_(0.0, fan_in**-0.5)
    return tower.train()


def patchify(images: Tensor) -> Tensor:
    """Pixel values in the image processor's order: uint8 [B, 3, S, S] -> float [B, (S / 14)^2, 3 * 2 * 14 * 14]."""
    batch, _, side, _ = images.shape
    cells = side // PATCH // MERGE
    normal = (images.float() / 255 - _MEAN) / _STD
    grouped = normal.view(batch, 3, cells, MERGE, PATCH, cells, MERGE, PATCH).permute(0, 2, 5, 3, 6, 1, 4, 7)
    # A still image is two equal frames.
    frames = grouped.unsqueeze(6).expand(-1, -1, -1, -1, -1, -1, TEMPORAL, -1, -1)
    return frames.reshape(batch, (cells * MERGE) ** 2, -1)


def _angles(cells: int, head_dim: int) -> Tensor:
    """Axial rotary angles of the patches in the processor's order (2x2 groups), [patches, head_dim]."""
    side = cells * MERGE
    rows = torch.arange(side)[:, None].expand(side, side)
    order = [
        grid.reshape(cells, MERGE, cells, MERGE).transpose(1, 2).reshape(-1) for grid in (rows, rows.transpose(0, 1))
    ]
    quarter = head_dim // 4
    frequencies = 10000.0 ** (-torch.arange(quarter, dtype=torch.float32) / quarter)
    half = torch.cat([position[:, None].float() * frequencies for position in order], dim=-1)
    return torch.cat([half, half], dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def look(tower: Any, pixels: Tensor) -> Tensor:
    """Image tokens of square images: [B, patches, 1176] -> [B, patches / 4, H]. Every patch sees the whole image."""
    batch, patches, _ = pixels.shape
    embed = tower.patch_embed.proj.weight
    x = F.linear(pixels, embed.flatten(1))
    width = x.shape[-1]
    heads = tower.blocks[0].attn.num_heads
    angles = _angles(round(patches**0.5) // MERGE, width // heads)
    cos, sin = angles.cos(), angles.sin()
    for block in tower.blocks:
        normed = F.rms_norm(x, (width,), block.norm1.weight, 1e-6)
        q, k, v = block.attn.qkv(normed).view(batch, patches, 3, heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v)
        x = x + block.attn.proj(attended.transpose(1, 2).reshape(batch, patches, width))
        x = x + block.mlp(F.rms_norm(x, (width,), block.norm2.weight, 1e-6))
    normed = F.rms_norm(x, (width,), tower.merger.ln_q.weight, 1e-6)
    return tower.merger.mlp(normed.reshape(batch, patches // MERGE**2, -1))


def export(tower: Any, adapter: nn.Module, path: Path, notes: dict[str, Any]) -> None:
    """Writes tower (under the published checkpoints' names) and language adapter in bfloat16; `notes` say how made."""
    parts = {"visual": tower.state_dict(), "adapter": adapter.state_dict()}
    state = {
        f"{part}.{name}": value.detach().bfloat16().contiguous()
        for part, values in parts.items()
        for name, value in values.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, path, metadata={"format": "pt", "d3tree": json.dumps(notes, sort_keys=True)})
    path.chmod(0o644)  # safetensors writes for the owner only
