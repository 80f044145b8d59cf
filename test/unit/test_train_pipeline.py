"""The tiny recipe end to end: target, prompts, shards, training, checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_d3tree.demo.target import MASK_TOKEN_ID, build_tiny_target
from sglang_d3tree.train import data, drafter
from sglang_d3tree.train.answers import Job, answer, prepare_image
from sglang_d3tree.train.image_prompts import image_questions
from sglang_d3tree.train.prompts import KINDS, Prompt, build_prompts
from sglang_d3tree.train.shards import DataOptions, load_shard, read_options, shard_paths
from sglang_d3tree.train.tower import LanguageTower

OPTIONS = DataOptions(seed=3, per_shard=6, max_new=20, long_max_new=28, sampled_share=0.4)
TRAIN = drafter.TrainOptions(
    layers=1, block_size=4, steps=60, rows=256, conversations=4, warmup_steps=5, lr=3e-3, warm=False,
    head_frequent=16, head_sample=8, soft=0.2,
)  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_target(tmp_path_factory.mktemp("tiny") / "target", vocab_size=64, seed=1)


@pytest.fixture(scope="module")
def shards(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data")
    data.generate(target, out, num_shards=3, options=OPTIONS, slots=4, progress=False)
    return out


def test_prompts_are_distinct_and_longer_lists_extend_shorter_ones() -> None:
    prompts = build_prompts(400, seed=5)
    assert len({p.text for p in prompts}) == 400
    assert build_prompts(100, seed=5) == prompts[:100]
    assert {p.kind for p in prompts} <= set(KINDS)
    assert 0 < sum(p.held_out for p in prompts) < 60
    assert not any("{" in p.text for p in prompts)


def test_generation_matches_transformers(target: Path, shards: Path) -> None:
    """Greedy answers and captured states are what transformers computes for the same tokens."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(target, dtype=torch.float32).eval()
    capture = read_options(shards).capture
    greedy = [c for c in load_shard(shard_paths(shards)[0]) if c.temperature == 0]
    assert greedy
    for c in greedy:
        with torch.no_grad():
            out = model(input_ids=torch.tensor([c.tokens]), output_hidden_states=True)
        predicted = out.logits[0].argmax(-1)[c.prompt_length - 1 : -1]
        assert predicted.tolist() == c.tokens[c.prompt_length :]
        states = torch.cat([out.hidden_states[i + 1][0] for i in capture], dim=-1)[:-1]
        torch.testing.assert_close(c.hidden[:-1], states.bfloat16(), rtol=2e-2, atol=2e-2)
        last = model.lm_head(model.model.language_model.norm(c.final[:-1].float()))
        torch.testing.assert_close(last, out.logits[0, :-1], rtol=0.1, atol=0.3)


def test_image_prompts_match_transformers(target: Path) -> None:
    """An image prompt beside a text prompt: same greedy answers as transformers, M-RoPE positions included."""
    from PIL import Image
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    processor = AutoProcessor.from_pretrained(target)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(target, dtype=torch.float32).eval()
    jobs, expected = [], []
    for color, text in (("red", "what is it"), ("blue", "what is it"), (None, "tell me more")):
        prompt, draws = Prompt(text, "image-long" if color else "explain", False), torch.rand(12)
        content = [{"type": "text", "text": text}]
        image = Image.new("RGB", (80, 112), color) if color else None
        if image is not None:
            content.insert(0, {"type": "image"})
            ids, terms = prepare_image(model, processor, image, text)
            assert terms.offset < 0
            jobs.append(Job(ids, prompt, 0.0, 12, draws, terms))
        rendered = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = processor(text=[rendered], images=[image] if image else None, return_tensors="pt")
        if image is None:
            jobs.append(Job(inputs["input_ids"][0].tolist(), prompt, 0.0, 12, draws))
        expected.append(model.generate(**inputs, max_new_tokens=12, do_sample=False)[0].tolist())
    tower = LanguageTower(target, capture=(0,))
    answers = answer(tower, jobs, stop_ids=[0, 2], slots=2)
    assert [a.tokens for a in answers] == expected
    assert not torch.equal(answers[0].hidden[-3], answers[1].hidden[-3])  # the image reaches the states


def test_resumed_data_is_identical(target: Path, shards: Path, tmp_path: Path) -> None:
    """A run that lost a shard, and two interleaved workers, write the same bytes."""
    data.generate(target, tmp_path, num_shards=1, options=OPTIONS, slots=4, progress=False)
    (tmp_path / "shard-00001.partial").write_bytes(b"half")
    for worker in (1, 0):
        data.generate(target, tmp_path, num_shards=3, options=OPTIONS, slots=4, worker=(worker, 2), progress=False)
    for path in shard_paths(shards):
        ours, theirs = load_file(tmp_path / path.name), load_file(path)
        for key, value in theirs.items():
            assert torch.equal(ours[key], value), key


def test_other_options_are_refused(target: Path, shards: Path) -> None:
    with pytest.raises(ValueError, match="other options"):
        data.generate(target, shards, num_shards=1, options=replace(OPTIONS, seed=4), progress=False)


def test_training_lowers_the_loss_and_resumes(target: Path, shards: Path, tmp_path: Path) -> None:
    """60 steps learn something; stopping after 30 and continuing ends at the same weights."""
    straight = drafter.Trainer(target, [shards], TRAIN)
    losses = [straight.train_step() for _ in range(TRAIN.steps)]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])

    first = drafter.Trainer(target, [shards], TRAIN)
    for _ in range(30):
        first.train_step()
    first.save(tmp_path / "state.pt")
    second = drafter.Trainer(target, [shards], TRAIN)
    second.restore(tmp_path / "state.pt")
    for _ in range(30):
        second.train_step()
    for a, b in zip(straight.average.parameters(), second.average.parameters(), strict=True):
        assert torch.equal(a, b)


def test_command_line_writes_a_checkpoint_sglang_can_parse(target: Path, shards: Path, tmp_path: Path) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    drafter.add_arguments(parser)
    args = parser.parse_args(
        ["--target", str(target), "--data", str(shards), "--run-dir", str(tmp_path / "run"), "--out",
         str(tmp_path / "out"), "--steps", "4", "--rows", "64", "--block-size", "4", "--layers", "2"]
    )  # fmt: skip
    assert drafter.run(args) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == 4
    assert config["num_target_layers"] == 4
    assert config["dflash_config"] == {"target_layer_ids": [0, 1, 2], "mask_token_id": MASK_TOKEN_ID}
    weights = load_file(tmp_path / "out" / "model.safetensors")
    per_layer = {
        "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
        "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    }  # fmt: skip
    expected = {f"layers.{i}.{name}.weight" for i in range(2) for name in per_layer}
    assert set(weights) == expected | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert weights["fc.weight"].shape == (64, 3 * 64)
    assert all(w.dtype == torch.bfloat16 for w in weights.values())
    report = json.loads((tmp_path / "run" / "final.json").read_text())
    assert 1.0 <= report["chain"] <= report["tree"] <= 4.0


def test_drafter_trains_further_from_a_checkpoint_of_its_own_shape(target: Path, shards: Path, tmp_path: Path) -> None:
    trainer = drafter.Trainer(target, [shards], TRAIN)
    for _ in range(3):
        trainer.train_step()
    drafter.save_dflash_checkpoint(trainer.model, tmp_path / "first")
    second = drafter.Trainer(target, [shards], replace(TRAIN, start_from=str(tmp_path / "first")))
    for mine, theirs in zip(second.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(mine, theirs.bfloat16().float())
    with pytest.raises(ValueError, match="--start-from"):
        drafter.Trainer(target, [shards], replace(TRAIN, layers=2, start_from=str(tmp_path / "first")))


def test_bfloat16_training_has_the_loss_of_float32(target: Path, shards: Path) -> None:
    losses = [drafter.Trainer(target, [shards], replace(TRAIN, dtype=t)).train_step() for t in ("float32", "bfloat16")]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] != losses[1]


def test_questions_about_images_become_shards_beside_text(target: Path, shards: Path, tmp_path: Path) -> None:
    """Held-out pictures are in the shards, marked; text and images train one drafter."""
    pytest.importorskip("easy_vqa")
    options = replace(OPTIONS, per_shard=24, max_new=8, long_max_new=12)
    data.generate(target, tmp_path, num_shards=1, options=options, images=True, slots=8, progress=False)
    train, held_out = drafter.load_conversations([tmp_path, shards])
    kinds = {c.kind for c in train}
    assert {"image-long", "image-short"} <= kinds and len(kinds) > 2
    assert any(c.kind.startswith("image") for c in held_out)
    trainer = drafter.Trainer(target, [tmp_path, shards], TRAIN)
    assert trainer.train_step() > 0


def test_questions_about_images_split_by_picture() -> None:
    pytest.importorskip("easy_vqa")
    questions = image_questions(200, seed=3)
    assert {q.prompt.kind for q in questions} == {"image-long", "image-short"}
    assert 5 <= sum(q.prompt.held_out for q in questions) <= 40
    assert [q.prompt for q in image_questions(20, seed=3)] == [q.prompt for q in questions[:20]]
