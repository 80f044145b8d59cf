"""Rows of questions, and the loss and marks that the language tower gives for image tokens."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_d3tree.demo import scenes
from sglang_d3tree.train import vision_data as data
from sglang_d3tree.train.vision_chat import ChatWriter, fill
from sglang_d3tree.train.vision_language import Adapter, Language, Pack, Prefix, answer_logits, pack, read
from sglang_d3tree.train.vision_pretrain import Images

ROW = 128
"""Tokens per row; questions are added while they fit, since padding costs as much as a question."""


@dataclass
class Teacher:
    """The language tower, perhaps with an adapter that learns along."""

    lm: Language
    writer: ChatWriter
    adapter: Adapter | None = None

    @torch.no_grad()
    def prefix(self) -> Prefix:
        """The chats' common beginning, read in as the adapter stands now."""
        return read(self.lm, self.writer.prefix, self.adapter)[1]

    def pack(self, rows: list[list[scenes.Chat]]) -> Pack:
        segments = [[self.writer.segment(chat) for chat in row] for row in rows]
        return pack(segments, data.GRID, len(self.writer.prefix), self.writer.image_id, self.writer.end_id)

    def logits(self, packed: Pack, tokens: Tensor) -> Tensor:
        """[T, V]; tokens: [B, 16, H]"""
        return answer_logits(self.lm, packed, tokens, self.writer.image_id, self.prefix(), self.adapter)


@dataclass(frozen=True)
class Lesson:
    """images: uint8 [B, 3, 112, 112] with their labels; chats[b]: what is asked about image b."""

    images: Tensor
    labels: data.Labels
    chats: list[list[scenes.Chat]]


def lesson(
    source: Images, writer: ChatWriter, step: int, scene_count: int, easy_count: int, noise: bool = True
) -> Lesson:
    """The images and questions of one training step: one written form and short questions per scene."""
    rng = random.Random(f"lesson-{source.seed}-{step}")
    batch = source.scenes(step, scene_count)
    chosen = source.easy_indices(step, easy_count)
    pictures, labels = data.easy_batch(source.easy, source.pixels, chosen, rng)
    images = torch.cat([batch.images, pictures])
    if noise:
        images = data.add_noise(images, torch.Generator().manual_seed(step))
    room = ROW - data.GRID**2 - 1
    chats = []
    for scene in batch.scenes:
        written = rng.choice(scenes.long_chats(scene, rng))
        chats.append(fill(writer, [written, *scenes.questions(scene, rng)], room))
    for index in chosen:
        asked = source.easy[index].chats
        chats.append(fill(writer, rng.sample(asked, len(asked)), room))
    return Lesson(images, data.join([batch.labels, labels]), chats)


def teach(teacher: Teacher, tokens: Tensor, chats: list[list[scenes.Chat]]) -> tuple[Tensor, dict[str, float]]:
    """Weighted cross-entropy of the answers, and the share of exact answers by kind (teacher-forced)."""
    packed = teacher.pack(chats)
    logits = teacher.logits(packed, tokens)
    losses = F.cross_entropy(logits, packed.targets, reduction="none")
    loss = (losses * packed.weights).sum() / packed.weights.sum()
    right = exact(logits, packed)
    return loss, {kind: sum(marks) / len(marks) for kind, marks in by_kind(chats, right).items()}


def exact(logits: Tensor, packed: Pack) -> list[bool]:
    """Per segment, whether every answer token is the argmax: then greedy decoding gives exactly this answer."""
    hits = logits.argmax(-1) == packed.targets
    wrong = torch.zeros(int(packed.owner.max()) + 1).index_add_(0, packed.owner, (~hits).float())
    return [bool(value == 0) for value in wrong]


def by_kind(chats: Iterable[Iterable[scenes.Chat]], right: list[bool]) -> dict[str, list[bool]]:
    marks = defaultdict(list)
    for chat, hit in zip((chat for row in chats for chat in row), right, strict=True):
        marks[chat.kind].append(hit)
    return marks
