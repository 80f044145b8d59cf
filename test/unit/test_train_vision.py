"""The vision recipe end to end on a tiny tower, and its lean forwards against transformers'."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from sglang_d3tree.demo import gallery, scenes
from sglang_d3tree.demo.target import build_tiny_target, merge_language_adapter, merge_vision_weights
from sglang_d3tree.train import vision, vision_data, vision_loop
from sglang_d3tree.train.data import generate
from sglang_d3tree.train.shards import DataOptions
from sglang_d3tree.train.vision_align import Images, lesson, teach
from sglang_d3tree.train.vision_chat import ChatWriter
from sglang_d3tree.train.vision_codes import CodeBook
from sglang_d3tree.train.vision_language import Adapter, Language, load_language, read, to_words
from sglang_d3tree.train.vision_regression import CodeError, fit_last_layer
from sglang_d3tree.train.vision_rehearsal import load_texts, perplexity, rehearse
from sglang_d3tree.train.vision_tower import build_tower, look, patchify

pytest.importorskip("easy_vqa")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2.5-VL of test size with SmolLM2's tokenizer."""
    return build_tiny_target(tmp_path_factory.mktemp("vision") / "target")


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Any:
    from transformers import Qwen2_5_VLForConditionalGeneration

    return Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def processor(tiny: Path) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(tiny)


def drawn(count: int) -> list[scenes.Picture]:
    source = scenes.scenes(5, held_out=False)
    return [scenes.render(next(source), 0) for _ in range(count)]


def test_pixels_equal_the_processors(processor: Any) -> None:
    images = [picture.image for picture in drawn(3)]
    small = vision_data.easy_vqa("test")[0]

    images.append(Image.open(small.path).convert("RGB"))
    expected = processor.image_processor(images=images, return_tensors="pt")["pixel_values"]
    tensors = [vision_data.to_tensor(image)[None] for image in images]
    mine = patchify(torch.cat([*tensors[:3], vision_data.resize(tensors[3])]))
    assert torch.allclose(mine.flatten(0, 1), expected, atol=1e-5)


def test_tower_equals_transformers(tiny: Path, reference: Any) -> None:
    tower = build_tower(tiny, seed=1)
    reference.model.visual.load_state_dict(tower.state_dict())
    pixels = patchify(torch.stack([vision_data.to_tensor(picture.image) for picture in drawn(2)]))
    with torch.no_grad():
        expected = reference.model.visual(pixels.flatten(0, 1), torch.tensor([[1, 8, 8]] * 2)).pooler_output
        mine = look(tower, pixels)
    assert torch.allclose(mine.flatten(0, 1), expected, atol=1e-4)


def test_packed_questions_equal_separate_chats(tiny: Path, reference: Any, processor: Any) -> None:
    """Each segment's answer logits are those of its own chat through transformers, template and all."""
    teacher = vision.load_teacher(tiny)
    rows = [
        [scenes.Chat("a", "What color is the star?", "red"), scenes.Chat("b", "List the shapes.", "1. red star")],
        [scenes.Chat("c", "How many shapes are there?", "two")],
    ]
    pictures = drawn(2)
    pixels = patchify(torch.stack([vision_data.to_tensor(picture.image) for picture in pictures]))
    packed = teacher.pack(rows)
    with torch.no_grad():
        logits = teacher.logits(packed, look(reference.model.visual, pixels))
    number = 0
    for row, picture in zip(rows, pictures, strict=True):
        for chat in row:
            user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": chat.prompt}]}
            text = processor.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
            text += chat.answer + processor.tokenizer.eos_token
            inputs = processor(images=[picture.image], text=[text], return_tensors="pt")
            answer = packed.targets[packed.owner == number]
            assert inputs["input_ids"][0, -len(answer) :].tolist() == answer.tolist()
            with torch.no_grad():
                expected = reference(**inputs).logits[0, -len(answer) - 1 : -1]
            assert torch.allclose(logits[packed.owner == number], expected, atol=2e-3)
            number += 1


def test_labels_follow_the_picture() -> None:
    thing = scenes.Thing(region=8, shape="star", color="teal", size="small")
    scene = scenes.Scene((thing,), text="7", text_region=0)
    labels = vision_data.label_pictures([scene], [scenes.render(scene, 0)])
    (token,) = torch.nonzero(labels.kind[0] == 1).flatten().tolist()
    assert token in (10, 11, 14, 15)
    assert vision_data.COLOR_NAMES[labels.color[0, token]] == "teal"
    assert labels.count.tolist() == [1] and labels.shape_counts.sum() == 1
    assert vision_data.TEXTS[int(labels.printed) - 1] == "7"


def test_easy_vqa_labels_match_its_answers() -> None:
    images = vision_data.easy_vqa("test")
    assert len(images) == 1000 and sum(len(image.chats) for image in images) == 9673
    for image in images[:200]:
        for chat in image.chats:
            if chat.answer in vision_data.COLOR_NAMES:
                assert image.color == chat.answer
            if chat.answer in scenes.SHAPES:
                assert image.shape == chat.answer
    moved, labels = vision_data.easy_batch(images[:4], vision_data.load_easy_pixels(images[:4]), [0, 1], None)
    assert moved.shape == (2, 3, scenes.SIDE, scenes.SIDE)
    assert (labels.kind == 1).sum() == 2


def test_codes_learn_through_the_frozen_tower(tiny: Path) -> None:
    """Gradients reach the codes through packing, prefix and language tower: the loss on one lesson falls."""
    teacher = vision.load_teacher(tiny)
    codes = CodeBook(teacher.lm.embed, teacher.writer.tokenizer)
    todo = lesson(Images.load(0), teacher.writer, 0, scene_count=1, easy_count=1, noise=False)
    optimizer = torch.optim.Adam(codes.parameters(), lr=0.05)
    losses = []
    for _ in range(6):
        loss, _ = teach(teacher, codes(todo.labels), todo.chats)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    assert not teacher.lm.embed.requires_grad


def test_the_error_is_zero_at_the_codes_and_one_at_each_kinds_mean(tiny: Path) -> None:
    """However few the things among the background's tokens: their mean alone names no shape."""
    teacher, source = vision.load_teacher(tiny), Images.load(0)
    codes = CodeBook(teacher.lm.embed, teacher.writer.tokenizer)
    _, labels = source.mixed(0, 48)
    error_of = CodeError(codes, labels)
    wanted = codes(labels)
    assert error_of(wanted, labels).item() == 0.0
    loss, accuracies = error_of.names(wanted, labels)
    assert loss.item() > 0 and all(share > 0.99 for share in accuracies.values())
    blurred = torch.empty_like(wanted)
    for kind in range(len(vision_data.KINDS)):
        chosen = labels.kind == kind
        blurred[chosen] = wanted[chosen].mean(0)
    assert error_of(blurred, labels).item() == pytest.approx(1.0, abs=0.05)
    assert error_of.names(blurred, labels)[1]["shape"] < 0.6


def test_the_last_layer_starts_at_the_closest_linear_map(tiny: Path) -> None:
    """No other weights are closer, every kind of token counting alike."""
    teacher, source = vision.load_teacher(tiny), Images.load(0)
    codes = CodeBook(teacher.lm.embed, teacher.writer.tokenizer).requires_grad_(False)
    images, labels = source.mixed(0, 64)
    tower = build_tower(tiny, seed=0)
    fit_last_layer(tower, codes, [(images, labels)])
    weight = (1.0 / torch.bincount(labels.kind.flatten()).clamp(min=1))[labels.kind]

    def error() -> torch.Tensor:
        squares = (look(tower, patchify(images)) - codes(labels)).square().mean(-1)
        return (weight * squares).sum()

    least = error()
    least.backward()
    layer = tower.merger.mlp[-1]
    assert least.item() < 0.9 * (weight * codes(labels).square().mean(-1)).sum().item()
    with torch.no_grad():
        layer.weight -= 0.01 * layer.weight.grad / layer.weight.grad.norm()
        assert error().item() >= least.item() * (1 - 1e-3)


def test_recipe_end_to_end(tiny: Path, tmp_path: Path, reference: Any, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    vision.add_arguments(parser)
    common = ["--target", str(tiny), "--work", str(tmp_path / "work"), "--batch", "8"]
    common += ["--scenes-per-step", "1", "--easy-per-step", "1"]
    few = [word for stage in vision.STAGES for word in (f"--{stage}-steps", "2")]

    def command(*more: str) -> None:
        assert vision.run(parser.parse_args([*common, *few, *more])) == 0

    command("--minutes", "0.00001")
    assert "carries on" in capsys.readouterr().out
    command()
    for stage in vision.STAGES:
        assert torch.load(tmp_path / "work" / f"{stage}.pt", weights_only=True)["step"] == 2
    before = (tmp_path / "work" / "polish.pt").stat().st_mtime_ns
    command()
    assert (tmp_path / "work" / "polish.pt").stat().st_mtime_ns == before, "finished stages are skipped"
    command("--evaluate", "tower", "--limit", "2")
    marks = json.loads((tmp_path / "work" / "evaluation-tower.json").read_text())["scores"]
    assert marks["easy-vqa test"]["total"] > 0 and marks["describe all"]["total"] == 2
    asset = tmp_path / "vision.safetensors"
    command("--export", str(asset))
    replaced = merge_vision_weights(reference, asset)
    assert replaced == len(reference.model.visual.state_dict())


def test_lessons_depend_on_seed_and_step_alone(tiny: Path) -> None:
    source, writer = Images.load(0), ChatWriter.load(tiny)
    one, two = (lesson(source, writer, 3, scene_count=2, easy_count=1) for _ in range(2))
    assert torch.equal(one.images, two.images) and one.chats == two.chats
    other = lesson(source, writer, 4, scene_count=2, easy_count=1)
    assert not torch.equal(one.images, other.images)
    assert all(not scenes.is_held_out(s) for s in source.scenes(3, 20).scenes)


def test_gallery_shows_wrong_answers_beside_the_right_ones(tiny: Path, tmp_path: Path) -> None:
    exhibits = [*gallery.scene_exhibits(1), *gallery.easy_exhibits(1)]
    shown = [gallery.Exhibit(e.name, e.image, e.chats[-1:]) for e in exhibits]
    out = tmp_path / "demo.md"
    right, total = gallery.write_gallery(gallery.Verifier(tiny, max_new_tokens=8), shown, out, "command")
    text = out.read_text()
    assert (right, total) == (0, 2), "a random model answers nothing right"
    assert text.count("**wrong**") == 2 and all(e.chats[0].prompt in text for e in shown)
    assert {p.name for p in (tmp_path / "demo").iterdir()} == {"scene-0.png", "easy-0.png"}


def random_adapter(lm: Language) -> Adapter:
    """An adapter that changes something: a fresh one adds zero."""
    adapter = Adapter(lm, rank=3)
    with torch.no_grad():
        for up in adapter.up.values():
            up.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(1))
    return adapter


def test_merged_adapter_computes_what_the_separate_one_did(tiny: Path) -> None:
    """What training saw is what the built verifier says; without a merge it says something else."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    lm, ids = load_language(tiny), torch.arange(20, 52)
    adapter = random_adapter(lm)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny, dtype=torch.float32).eval()
    with torch.no_grad():
        separate = to_words(lm, read(lm, ids, adapter)[0])
        original = model(input_ids=ids[None]).logits[0]
        changed = merge_language_adapter(model, adapter.state_dict())
        merged = model(input_ids=ids[None]).logits[0]
    assert changed == 7 * len(lm.blocks)
    assert torch.allclose(merged, separate, atol=2e-3)
    assert not torch.allclose(merged, original, atol=2e-2)


def test_rehearsal_measures_how_far_the_text_moved(tiny: Path, tmp_path: Path) -> None:
    """Zero for a fresh adapter, positive and with a gradient for one that changes the text."""
    options = DataOptions(seed=3, per_shard=12, max_new=16, long_max_new=20)
    generate(tiny, tmp_path, num_shards=1, options=options, slots=8, progress=False)
    teacher = vision.load_teacher(tiny)
    texts = load_texts(tmp_path, held_out=False)
    teacher.adapter = Adapter(teacher.lm, rank=3)
    # The data keep the original's states in bfloat16.
    assert rehearse(teacher, texts, 0).item() == pytest.approx(0.0, abs=2e-3)
    teacher.adapter = random_adapter(teacher.lm)
    drift = rehearse(teacher, texts, 0)
    drift.backward()
    assert drift.item() > 5e-3
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in teacher.adapter.up.values())
    marks = perplexity((teacher.lm, None), (teacher.lm, teacher.adapter), [torch.tensor(texts[0].tokens)])
    assert marks.original != marks.adapted
    with pytest.raises(FileNotFoundError, match="data generate"):
        load_texts(tmp_path / "nothing", held_out=True)


def _one_process(rank: int, address: str, out: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    module = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(module.weight)
    seen = []

    def step(number: int) -> tuple[torch.Tensor, dict[str, float]]:
        seen.append(number)
        return module(torch.eye(2)[number % 2]).sum(), {}

    vision_loop.train(out / "two.pt", {"m": module}, {"m": 0.1}, 3, step)
    torch.save({"weight": module.weight, "seen": seen}, out / f"{rank}.pt")


def test_two_processes_take_turns_and_end_with_the_same_weights(tmp_path: Path) -> None:
    address = f"file://{tmp_path / 'meeting'}"
    torch.multiprocessing.spawn(_one_process, args=(address, tmp_path), nprocs=2)  # type: ignore[no-untyped-call]
    one, two = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))
    assert one["seen"] == [0, 2, 4] and two["seen"] == [1, 3, 5]
    assert torch.equal(one["weight"], two["weight"])
    assert torch.load(tmp_path / "two.pt", weights_only=True)["step"] == 3
