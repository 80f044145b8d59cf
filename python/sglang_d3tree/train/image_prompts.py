"""Built-in prompts about images: rendered scenes and easy-VQA pictures, for long and short answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image

from sglang_d3tree.demo import scenes
from sglang_d3tree.train.prompts import Prompt

EASY_SHARE, HELD_OUT_SHARE = 0.2, 0.1
LONG_SHARE = 0.6
"""Of the questions about scenes; easy-VQA has short answers only."""


@dataclass(frozen=True)
class ImageQuestion:
    """A picture, what is asked about it, and whether the picture is kept from training."""

    image: Image.Image
    prompt: Prompt


def image_questions(count: int, seed: int) -> list[ImageQuestion]:
    """``count`` questions, each about a picture of its own.

    Held out are the scenes that no training here ever uses, and easy-VQA's test split: the split is by image.
    """
    rng = random.Random(f"image-questions-{seed}")
    drawn = _scene_questions(rng, seed)
    easy = _easy_questions(rng)
    return [next(easy if rng.random() < EASY_SHARE else drawn) for _ in range(count)]


def _scene_questions(rng: random.Random, seed: int) -> Iterator[ImageQuestion]:
    while True:
        scene = scenes.sample_scene(rng)
        long = rng.random() < LONG_SHARE
        chat = rng.choice((scenes.long_chats if long else scenes.questions)(scene, rng))
        prompt = Prompt(chat.prompt, "image-long" if long else "image-short", scenes.is_held_out(scene))
        yield ImageQuestion(scenes.render(scene, seed).image, prompt)


def _easy_questions(rng: random.Random) -> Iterator[ImageQuestion]:
    from sglang_d3tree.train.vision_data import easy_vqa

    splits = {held_out: easy_vqa("test" if held_out else "train") for held_out in (False, True)}
    while True:
        held_out = rng.random() < HELD_OUT_SHARE
        picture = rng.choice(splits[held_out])
        chat = rng.choice(picture.chats)
        yield ImageQuestion(Image.open(picture.path).convert("RGB"), Prompt(chat.prompt, "image-short", held_out))
