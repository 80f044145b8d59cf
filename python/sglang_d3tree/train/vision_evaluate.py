"""Marks for a vision tower: easy-VQA's test split and held-out scenes, with counts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import islice
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from sglang_d3tree.demo import scenes
from sglang_d3tree.demo.gallery import Verifier
from sglang_d3tree.train import vision_data as data
from sglang_d3tree.train.vision_align import Teacher, by_kind, exact
from sglang_d3tree.train.vision_tower import look, patchify

EVALUATION_SEED = 20_000
ROWS = 8


@dataclass
class Tally:
    right: int = 0
    total: int = 0

    def add(self, marks: list[bool]) -> None:
        self.right += sum(marks)
        self.total += len(marks)

    def __str__(self) -> str:
        return f"{self.right}/{self.total} = {self.right / max(1, self.total):.3f}"


Scores = dict[str, Tally]


def total(scores: Scores, kinds: Sequence[str]) -> Tally:
    """The marks of several kinds together."""
    return Tally(sum(scores[kind].right for kind in kinds), sum(scores[kind].total for kind in kinds))


Tokens = Callable[[Tensor, data.Labels | None], Tensor]
"""uint8 images [B, 3, 112, 112] and their labels (when known) -> image tokens [B, 16, H]"""


def tower_tokens(tower: Any) -> Tokens:
    return lambda images, _: look(tower, patchify(images))


@torch.no_grad()
def score_short(
    teacher: Teacher, tokens: Tokens, items: Iterator[tuple[Tensor, data.Labels | None, list[scenes.Chat]]], total: int
) -> Scores:
    """Share of questions whose greedy answer is exactly the reference, by kind.

    One teacher-forced pass decides it: greedy decoding gives the reference if and only if each of its tokens,
    the end of turn included, is the argmax after those before it.
    """
    scores: Scores = {}
    with tqdm(total=total, mininterval=10, desc="questions") as bar:
        while batch := list(islice(items, ROWS)):
            images = torch.stack([image for image, _, _ in batch])
            known = [labels for _, labels, _ in batch if labels is not None]
            chats = [asked for _, _, asked in batch]
            packed = teacher.pack(chats)
            labels = data.join(known) if len(known) == len(batch) else None
            logits = teacher.logits(packed, tokens(images, labels))
            for kind, marks in by_kind(chats, exact(logits, packed)).items():
                scores.setdefault(kind, Tally()).add(marks)
            bar.update(len(batch))
    return scores


def easy_items(limit: int | None) -> list[tuple[Tensor, data.Labels | None, list[scenes.Chat]]]:
    """Every question of the first `limit` images of easy-VQA's test split."""
    images = data.easy_vqa("test")[:limit]
    return [(data.resize(data.to_tensor(Image.open(image.path))[None])[0], None, list(image.chats)) for image in images]


def easy_items_with_labels(limit: int | None) -> list[tuple[Tensor, data.Labels | None, list[scenes.Chat]]]:
    images = data.easy_vqa("test")[:limit]
    pixels = data.load_easy_pixels(images)
    items: list[tuple[Tensor, data.Labels | None, list[scenes.Chat]]] = []
    for i, image in enumerate(images):
        if image.shape and image.color:
            picture, labels = data.easy_batch(images, pixels, [i], None)
            items.append((picture[0], labels, list(image.chats)))
    return items


def held_out_scenes(count: int) -> list[tuple[scenes.Scene, scenes.Picture]]:
    chosen = islice(scenes.scenes(EVALUATION_SEED, held_out=True), count)
    return [(scene, scenes.render(scene, EVALUATION_SEED)) for scene in chosen]


def scene_items(
    drawn: list[tuple[scenes.Scene, scenes.Picture]],
) -> Iterator[tuple[Tensor, data.Labels | None, list[scenes.Chat]]]:
    """Every short question of each scene."""
    for i, (scene, picture) in enumerate(drawn):
        labels = data.label_pictures([scene], [picture])
        yield data.to_tensor(picture.image), labels, scenes.questions(scene, random.Random(i))


def score_descriptions(verifier: Verifier, drawn: list[tuple[scenes.Scene, scenes.Picture]], batch: int = 16) -> Scores:
    """Greedy descriptions of held-out scenes: are shapes, colours and the count the drawn ones?"""
    scores: Scores = {f"describe {what}": Tally() for what in ("shapes", "colors", "count", "pairs", "all", "exact")}
    for start in tqdm(range(0, len(drawn), batch), mininterval=10, desc="descriptions"):
        part = drawn[start : start + batch]
        texts = verifier.answer([p.image for _, p in part], [scenes.DESCRIBE_PROMPTS[0]] * len(part))
        for (scene, _), text in zip(part, texts, strict=True):
            grade = scenes.grade_description(scene, text)
            marks = (*astuple(grade), grade.all, text == scenes.describe(scene))
            for tally, mark in zip(scores.values(), marks, strict=True):
                tally.add([mark])
    return scores
