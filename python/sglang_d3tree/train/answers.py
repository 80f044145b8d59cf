"""The target answers prompts, many at a time, and its hidden states are kept.

A drafter has to guess what *this* target says next, so it learns from the target's own answers. The states of the
captured layers fall out of the generation for free: computing them again would cost as much as half of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sglang_d3tree.train.prompts import Prompt
from sglang_d3tree.train.tower import LanguageTower


@dataclass
class Conversation:
    """A prompt and the target's answer.

    tokens: prompt ids and then the answer's, the stop token included when it came. hidden: [len(tokens), K * H]
    bfloat16, the captured layers; final: [len(tokens), H] bfloat16, the last layer's output before the final norm
    (row i, through norm and head, is the target's distribution of token i + 1). The last token was never fed back:
    its rows are zero, and no block ever needs them.
    """

    tokens: list[int]
    prompt_length: int
    temperature: float
    kind: str
    held_out: bool
    hidden: torch.Tensor = field(repr=False)
    final: torch.Tensor = field(repr=False)


@dataclass(frozen=True)
class ImagePrompt:
    """What an image changes about a prompt of P tokens.

    embeds: [P, H], image features in the places of the image tokens. positions: [3, P], M-RoPE coordinates.
    """

    embeds: torch.Tensor
    positions: torch.Tensor

    @property
    def offset(self) -> int:
        """What to add to a later token's index to get its position (images take fewer positions than tokens)."""
        return int(self.positions.max()) + 1 - self.positions.shape[1]


@dataclass(frozen=True)
class Job:
    """One prompt waiting for its answer. draws: uniform numbers, one per sampled token."""

    ids: list[int]
    prompt: Prompt
    temperature: float
    max_new: int
    draws: torch.Tensor
    image: ImagePrompt | None = None


def load_image_model(target_dir: Path) -> Any:
    """The whole target by transformers, float32, for ``prepare_image``."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    return Qwen2_5_VLForConditionalGeneration.from_pretrained(target_dir, dtype=torch.float32).eval()


@torch.inference_mode()
def prepare_image(model: Any, processor: Any, image: Any, text: str) -> tuple[list[int], ImagePrompt]:
    """Token ids and image terms of one chat turn (image first, then text), from transformers' own model and processor.

    model: a float32 ``Qwen2_5_VLForConditionalGeneration``; image: a PIL image.
    """
    content = [{"type": "image"}, {"type": "text", "text": text}]
    rendered = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=[rendered], images=[image], return_tensors="pt")
    ids, grid = inputs["input_ids"], inputs["image_grid_thw"]
    features = model.model.get_image_features(inputs["pixel_values"], grid).pooler_output[0]
    embeds = model.get_input_embeddings()(ids)[0].clone()
    embeds[ids[0] == model.config.image_token_id] = features.float()
    positions, _ = model.model.get_rope_index(ids, inputs["mm_token_type_ids"], image_grid_thw=grid)
    return ids[0].tolist(), ImagePrompt(embeds, positions[:, 0])


def _choose(logits: torch.Tensor, temperature: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
    """Next tokens [b]: argmax where the temperature is 0, else the inverse CDF at ``draw``. logits: [b, V]."""
    chosen = logits.argmax(dim=-1)
    sampled = temperature > 0
    if sampled.any():
        probs = torch.softmax(logits[sampled] / temperature[sampled, None], dim=-1)
        cdf = probs.cumsum(dim=-1)
        pick = torch.searchsorted(cdf, (draw[sampled] * cdf[:, -1])[:, None], right=True).squeeze(1)
        chosen[sampled] = pick.clamp_(max=logits.shape[-1] - 1)
    return chosen


class Answering:
    """One batch of jobs on their way through the target.

    A slot that finishes takes the next job. Refills wait until a few slots are free (a prefill of one prompt
    costs almost as much as one of eight). The prompts' common beginning is computed once.
    """

    def __init__(self, tower: LanguageTower, jobs: Sequence[Job], stop_ids: Sequence[int], slots: int) -> None:
        self.tower, self.jobs, self.stop = tower, jobs, set(stop_ids)
        self.slots = min(slots, len(jobs))
        capacity = max(len(job.ids) + job.max_new for job in jobs) + 1  # idle slots write one past their end
        self.cache = tower.new_cache(self.slots, capacity)
        # The captured layers' outputs and, last, the whole tower's.
        width = tower.dims.hidden_size * (len(tower.capture) + 1)
        self.states = torch.zeros(self.slots, capacity, width, dtype=torch.bfloat16)
        self.owner: list[int | None] = [None] * self.slots  # slot -> job
        self.texts: list[list[int]] = [list(job.ids) for job in jobs]
        self.waiting = list(range(len(jobs)))[::-1]
        self.temperature = torch.zeros(self.slots)
        self.lengths = torch.zeros(self.slots, dtype=torch.long)
        self.offsets = torch.zeros(self.slots, dtype=torch.long)
        self.results: dict[int, Conversation] = {}
        self.shared = self._prefill_common()

    def _prefill_common(self) -> int:
        """Compute the jobs' common beginning (up to the first image) into every slot; returns its length."""
        shared = _common_prefix([job.ids for job in self.jobs])
        for job in self.jobs:
            if job.image is not None:
                special = (job.image.embeds != self.tower.embedding[torch.tensor(job.ids)]).any(dim=1)
                shared = min(shared, int(special.long().argmax()) if special.any() else shared)
        if shared:
            ids = torch.tensor(self.jobs[0].ids[:shared])
            one = self.tower.new_cache(1, shared)
            start = torch.zeros(1, dtype=torch.long)
            hidden, captured = self.tower.forward(self.tower.embedding[ids][None], start, one, slice(0, 1))
            self.cache.k[:, :, :, :shared], self.cache.v[:, :, :, :shared] = one.k, one.v
            self.states[:, :shared] = torch.cat([captured, hidden], dim=-1)[0].to(torch.bfloat16)
        return shared

    def run(self, on_step: Any = None) -> list[Conversation]:
        """All answers, in the order of the jobs. on_step: called with the number of busy slots before each pass."""
        while len(self.results) < len(self.jobs):
            busy = [s for s, job in enumerate(self.owner) if job is not None]
            free = [s for s, job in enumerate(self.owner) if job is None]
            if on_step is not None:
                on_step(len(busy))
            if self.waiting and len(free) >= min(max(1, self.slots // 8), len(self.waiting)):
                self._refill(free[: len(self.waiting)])
            else:
                self._decode(busy)
        return [self.results[i] for i in range(len(self.jobs))]

    def _job(self, slot: int) -> tuple[int, Job]:
        index = self.owner[slot]
        assert index is not None
        return index, self.jobs[index]

    def _refill(self, rows: list[int]) -> None:
        """Prefill waiting jobs into free slots and take their first tokens."""
        for slot in rows:
            self.owner[slot] = self.waiting.pop()
            _, job = self._job(slot)
            self.temperature[slot], self.lengths[slot] = job.temperature, len(job.ids)
            self.offsets[slot] = job.image.offset if job.image else 0
        jobs = [self._job(slot)[1] for slot in rows]
        longest = max(len(job.ids) for job in jobs)
        embeds = torch.zeros(len(rows), longest, self.tower.dims.hidden_size)
        positions = torch.arange(longest).repeat(3, len(rows), 1)
        for i, job in enumerate(jobs):
            n = len(job.ids)
            embeds[i, :n] = self.tower.embedding[torch.tensor(job.ids)] if job.image is None else job.image.embeds
            if job.image is not None:
                positions[:, i, :n] = job.image.positions
        start = torch.full((len(rows),), self.shared)
        hidden, captured = self.tower.forward(
            embeds[:, self.shared :], start, self.cache, torch.tensor(rows), positions[..., self.shared :]
        )
        self.states[rows, self.shared : longest] = torch.cat([captured, hidden], dim=-1).to(torch.bfloat16)
        last = torch.tensor([len(job.ids) - 1 - self.shared for job in jobs])
        self._accept(rows, hidden[torch.arange(len(rows)), last])

    def _decode(self, rows: list[int]) -> None:
        """Feed every busy slot its last token."""
        ids = torch.zeros(self.slots, dtype=torch.long)
        ids[rows] = torch.tensor([self.texts[self._job(s)[0]][-1] for s in rows])
        positions = (self.lengths + self.offsets).expand(3, -1)[..., None]
        if 2 * len(rows) > self.slots:
            # Idle slots compute along: reading the whole cache in place is cheaper than gathering the busy rows.
            embeds = self.tower.embedding[ids][:, None]
            hidden, captured = self.tower.forward(embeds, self.lengths, self.cache, slice(0, self.slots), positions)
            hidden, captured = hidden[rows], captured[rows]
        else:
            embeds = self.tower.embedding[ids[rows]][:, None]
            where = torch.tensor(rows)
            hidden, captured = self.tower.forward(embeds, self.lengths[rows], self.cache, where, positions[:, rows])
        self.states[rows, self.lengths[rows]] = torch.cat([captured, hidden], dim=-1)[:, 0].to(torch.bfloat16)
        self.lengths[rows] += 1
        self._accept(rows, hidden[:, 0])

    def _accept(self, rows: list[int], hidden: torch.Tensor) -> None:
        """Choose the next token of each row from the tower's output [rows, H]; free the slots that are done."""
        draws = torch.zeros(len(rows))
        for i, slot in enumerate(rows):
            index, job = self._job(slot)
            if job.temperature:
                draws[i] = job.draws[len(self.texts[index]) - len(job.ids)]
        tokens = _choose(self.tower.logits(hidden), self.temperature[rows], draws)
        for slot, token in zip(rows, tokens.tolist(), strict=True):
            index, job = self._job(slot)
            text = self.texts[index]
            text.append(token)
            if token in self.stop or len(text) - len(job.ids) >= job.max_new:
                states = self.states[slot, : len(text)].clone()
                states[-1] = 0
                width = self.tower.dims.hidden_size
                self.results[index] = Conversation(
                    tokens=text,
                    prompt_length=len(job.ids),
                    temperature=job.temperature,
                    kind=job.prompt.kind,
                    held_out=job.prompt.held_out,
                    hidden=states[:, :-width],
                    final=states[:, -width:],
                )
                self.owner[slot] = None


@torch.inference_mode()
def answer(
    tower: LanguageTower, jobs: Sequence[Job], *, stop_ids: Sequence[int], slots: int = 128, on_step: Any = None
) -> list[Conversation]:
    """Let the target answer every job; the order of the result is the order of the jobs."""
    return Answering(tower, jobs, stop_ids, slots).run(on_step)


def _common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Length of the longest common beginning, one short of the shortest sequence at most."""
    limit = min(map(len, sequences)) - 1
    first = sequences[0]
    for i in range(limit):
        if any(s[i] != first[i] for s in sequences):
            return i
    return limit
