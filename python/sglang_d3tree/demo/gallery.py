"""Writes docs/demo.md: held-out pictures, what the demo verifier was asked about them, and what it said.

Nothing is picked: the pictures are the first held-out scenes (and easy-VQA test images) of a fixed seed, and wrong
answers are shown with the right one beside them.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from sglang_d3tree.demo import scenes
from sglang_d3tree.demo.target import merge_language_adapter

GALLERY_SEED = 30_000
SHOWN_SIDE = 168


class Verifier:
    """The demo verifier in transformers, with its own processor and chat template; greedy, float32."""

    def __init__(
        self,
        checkpoint: Path,
        vision_state: dict[str, torch.Tensor] | None = None,
        adapter: dict[str, torch.Tensor] | None = None,
        max_new_tokens: int = 128,
    ) -> None:
        """vision_state: weights of another vision tower to look through. adapter: to add to the language tower."""
        from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

        self.max_new_tokens = max_new_tokens
        self.processor: Any = AutoProcessor.from_pretrained(checkpoint)
        self.processor.tokenizer.padding_side = "left"
        self.model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
        if vision_state is not None:
            self.model.model.visual.load_state_dict(vision_state)
        if adapter is not None:
            merge_language_adapter(self.model, adapter)

    @torch.no_grad()
    def answer(self, images: list[Image.Image], prompts: list[str]) -> list[str]:
        """One answer per image and prompt."""
        texts = []
        for prompt in prompts:
            user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt}]}
            texts.append(self.processor.apply_chat_template([user], tokenize=False, add_generation_prompt=True))
        inputs = self.processor(images=images, text=texts, padding=True, return_tensors="pt")
        output = self.model.generate(**inputs, do_sample=False, max_new_tokens=self.max_new_tokens)
        new = output[:, inputs["input_ids"].shape[1] :]
        answers: list[str] = self.processor.batch_decode(new, skip_special_tokens=True)
        return answers


@dataclass(frozen=True)
class Exhibit:
    """One picture and the questions about it."""

    name: str
    image: Image.Image
    chats: list[scenes.Chat]


def scene_exhibits(count: int) -> Iterable[Exhibit]:
    for i, scene in enumerate(islice(scenes.scenes(GALLERY_SEED, held_out=True), count)):
        rng = random.Random(i)
        chats = [*scenes.long_chats(scene, rng), *scenes.questions(scene, rng)[:3]]
        yield Exhibit(f"scene-{i}", scenes.render(scene, GALLERY_SEED).image, chats)


def easy_exhibits(count: int) -> Iterable[Exhibit]:
    """From easy-VQA's test split, if the package is there (it comes with the `train` extra)."""
    try:
        from sglang_d3tree.train.vision_data import easy_vqa
    except ImportError:
        return
    for i, image in enumerate(random.Random(GALLERY_SEED).sample(easy_vqa("test"), count)):
        yield Exhibit(f"easy-{i}", Image.open(image.path).convert("RGB"), list(image.chats)[:4])


def is_right(chat: scenes.Chat, answer: str) -> bool:
    return answer.strip() == chat.answer


def entry(exhibit: Exhibit, answers: list[str], picture: str) -> str:
    """Markdown of one exhibit."""
    lines = [
        f'<img src="{picture}" width="{SHOWN_SIDE}" alt="{exhibit.name}">',
        "",
        "| asked | said | |",
        "|---|---|---|",
    ]
    for chat, answer in zip(exhibit.chats, answers, strict=True):
        mark = "right" if is_right(chat, answer) else f"**wrong**, it is: {_cell(chat.answer)}"
        lines.append(f"| {_cell(chat.prompt)} | {_cell(answer)} | {mark} |")
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    return text.strip().replace("|", "\\|").replace("\n", "<br>")


def write_gallery(verifier: Verifier, exhibits: list[Exhibit], out: Path, command: str) -> tuple[int, int]:
    """Writes `out` and its pictures into a folder beside it; returns how many answers are right, and of how many."""
    pictures = out.with_suffix("")
    pictures.mkdir(parents=True, exist_ok=True)
    entries, right, total = [], 0, 0
    for exhibit in exhibits:
        exhibit.image.save(pictures / f"{exhibit.name}.png")
        answers = verifier.answer([exhibit.image] * len(exhibit.chats), [chat.prompt for chat in exhibit.chats])
        right += sum(is_right(chat, answer) for chat, answer in zip(exhibit.chats, answers, strict=True))
        total += len(answers)
        entries.append(entry(exhibit, answers, f"{pictures.name}/{exhibit.name}.png"))
    head = [
        "# What the demo verifier sees and says",
        "",
        f"Written by `{command}`: the first pictures of a fixed seed that training never saw, greedy answers in",
        f"float32. {right} of {total} answers are word for word the expected ones.",
        "",
    ]
    out.write_text("\n".join([*head, *entries]))
    return right, total


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", type=Path, default=Path(".cache/d3tree/target"), help="verifier checkpoint")
    parser.add_argument("--out", type=Path, default=Path("docs/demo.md"))
    parser.add_argument("--scenes", type=int, default=6)
    parser.add_argument("--easy", type=int, default=4, help="easy-VQA test images")


def run(args: argparse.Namespace) -> int:
    exhibits = [*scene_exhibits(args.scenes), *easy_exhibits(args.easy)]
    command = "python -m sglang_d3tree.demo.gallery"
    right, total = write_gallery(Verifier(args.target), exhibits, args.out, command)
    print(f"{args.out}: {right}/{total} answers right")
    return 0


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(_parser)
    raise SystemExit(run(_parser.parse_args()))
