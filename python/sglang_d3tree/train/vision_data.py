"""What the vision tower is trained on: rendered scenes and easy-VQA's train split, as images and labels.

Labels name, for each of the image's tokens, what lies under it, and for the whole image what can be counted. They come
from the scene itself; for easy-VQA from its questions and from where the picture departs from its plain background.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sglang_d3tree.demo import scenes

CELL = 28
"""Pixels per side of an image token."""
GRID = scenes.SIDE // CELL
IGNORE = -100
KINDS = ("background", "thing", "text")
TEXTS = scenes.WORDS + scenes.DIGITS
COLOR_NAMES = tuple(scenes.COLORS)
MAX_OF_A_COLOR = 2
"""Colour counts above this are one class."""


@dataclass(frozen=True)
class Labels:
    """Class indices, `IGNORE` where there is nothing to say. Per token [B, 16], then per image [B] or [B, n]."""

    kind: Tensor
    order: Tensor
    color: Tensor
    shape: Tensor
    size: Tensor
    region: Tensor
    text: Tensor
    count: Tensor
    shape_counts: Tensor
    color_counts: Tensor
    printed: Tensor
    """0 for no text, else 1 + its index."""


TOKEN_CLASSES = {
    "kind": len(KINDS),
    "order": len(scenes.ORDINALS),
    "color": len(COLOR_NAMES),
    "shape": len(scenes.SHAPES),
    "size": len(scenes.SIZES),
    "region": len(scenes.REGIONS),
    "text": len(TEXTS),
}
IMAGE_CLASSES = {
    "count": (1, scenes.MAX_THINGS + 1),
    "shape_counts": (len(scenes.SHAPES), scenes.MAX_THINGS + 1),
    "color_counts": (len(COLOR_NAMES), MAX_OF_A_COLOR + 1),
    "printed": (1, len(TEXTS) + 1),
}
"""How many questions of each name an image has, and how many answers each allows."""


def _token_at(x: float, y: float) -> int:
    column, row = (min(GRID - 1, max(0, int(value // CELL))) for value in (x, y))
    return row * GRID + column


def _blank_labels(batch: int) -> Labels:
    per_token = [torch.full((batch, GRID * GRID), IGNORE) for _ in TOKEN_CLASSES]
    per_token[0] = torch.zeros_like(per_token[0])
    per_image = [torch.zeros((batch, n), dtype=torch.long) for n, _ in IMAGE_CLASSES.values()]
    return Labels(*per_token, *(x[:, 0] if x.shape[1] == 1 else x for x in per_image))


def label_pictures(drawn: list[scenes.Scene], pictures: list[scenes.Picture]) -> Labels:
    labels = _blank_labels(len(drawn))
    for i, (scene, picture) in enumerate(zip(drawn, pictures, strict=True)):
        _label_scene(labels, i, scene, picture)
    return labels


def _label_scene(labels: Labels, i: int, scene: scenes.Scene, picture: scenes.Picture) -> None:
    for order, (thing, center) in enumerate(zip(scene.things, picture.centers, strict=True)):
        token = _token_at(*center)
        labels.kind[i, token] = 1
        labels.order[i, token] = order
        labels.color[i, token] = COLOR_NAMES.index(thing.color)
        labels.shape[i, token] = scenes.SHAPES.index(thing.shape)
        labels.size[i, token] = scenes.SIZES.index(thing.size)
        labels.region[i, token] = thing.region
        labels.shape_counts[i, scenes.SHAPES.index(thing.shape)] += 1
        labels.color_counts[i, COLOR_NAMES.index(thing.color)] += 1
    labels.color_counts[i].clamp_(max=MAX_OF_A_COLOR)
    labels.count[i] = len(scene.things)
    if scene.text is not None and picture.text_box is not None:
        left, top, right, bottom = picture.text_box
        token = _token_at((left + right) / 2, (top + bottom) / 2)
        labels.kind[i, token] = 2
        labels.text[i, token] = TEXTS.index(scene.text)
        labels.printed[i] = 1 + TEXTS.index(scene.text)


def join(parts: list[Labels]) -> Labels:
    return Labels(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Labels)))


def to_tensor(image: Image.Image) -> Tensor:
    """uint8 [3, S, S]"""
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


@dataclass(frozen=True)
class SceneBatch:
    """images: uint8 [B, 3, 112, 112]."""

    scenes: list[scenes.Scene]
    images: Tensor
    labels: Labels


def scene_batch(source: Iterator[scenes.Scene], size: int, seed: int) -> SceneBatch:
    chosen = [next(source) for _ in range(size)]
    pictures = [scenes.render(scene, seed) for scene in chosen]
    images = torch.stack([to_tensor(picture.image) for picture in pictures])
    return SceneBatch(chosen, images, label_pictures(chosen, pictures))


def add_noise(images: Tensor, generator: torch.Generator) -> Tensor:
    """Brightness, contrast and grain, different for every image; colours stay nameable. uint8 in and out."""
    batch = images.shape[0]

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(batch, 1, 1, 1, generator=generator)

    grain = torch.randn(images.shape, generator=generator) * uniform(-6, 6).clamp(min=0)
    noisy = (images.float() - 128) * uniform(0.94, 1.06) + 128 + uniform(-6, 6) + grain
    return noisy.clamp(0, 255).round().byte()


# --- easy-VQA -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EasyImage:
    """One easy-VQA picture: a single shape. shape, color: "" where no question gives them away."""

    path: Path
    shape: str
    color: str
    chats: tuple[scenes.Chat, ...]


def easy_vqa(split: str) -> list[EasyImage]:
    """The "train" (4,000 images, 38,575 questions) or "test" (1,000; 9,673) split of PyPI easy-vqa 1.0 (MIT)."""
    import easy_vqa as source

    load = {
        "train": (source.get_train_questions, source.get_train_image_paths),
        "test": (source.get_test_questions, source.get_test_image_paths),
    }[split]
    texts, answers, image_ids = load[0]()
    chats = defaultdict(list)
    for text, answer, image_id in zip(texts, answers, image_ids, strict=True):
        chats[image_id].append(scenes.Chat(_easy_kind(answer), text[0].upper() + text[1:], answer))
    return [
        EasyImage(Path(path), *_what_is_drawn(chats[image_id]), tuple(chats[image_id]))
        for image_id, path in sorted(load[1]().items())
        if image_id in chats
    ]


def _easy_kind(answer: str) -> str:
    return "easy-yesno" if answer in ("yes", "no") else "easy-name"


_NEGATION = re.compile(r"\b(not|no)\b")


def _what_is_drawn(chats: list[scenes.Chat]) -> tuple[str, str]:
    """Shape and colour of the picture's only thing, as far as its questions give them away ("" if they do not)."""
    found = {"shape": "", "color": ""}
    for chat in chats:
        text = chat.prompt.lower()
        for what, names in (("shape", scenes.SHAPES), ("color", COLOR_NAMES)):
            if chat.answer in names:
                found[what] = chat.answer
            elif chat.kind == "easy-name" or (chat.answer == "yes") != bool(_NEGATION.search(text)):
                # The question itself says what is there: by naming the thing, or as a statement that holds.
                found[what] = next((n for n in names if re.search(rf"\b{n}\b", text)), found[what])
    return found["shape"], found["color"]


@dataclass(frozen=True)
class EasyPixels:
    """Raw pictures for augmentation. images: uint8 [N, 64, 64, 3]; mask: bool [N, 64, 64], true on the shape."""

    images: np.ndarray
    mask: np.ndarray


def load_easy_pixels(images: list[EasyImage]) -> EasyPixels:
    pixels = np.stack([np.array(Image.open(image.path).convert("RGB")) for image in images])
    # The background is plain and light; the shape may touch any border, so the commonest light pixel decides.
    coded = (pixels.astype(np.int32) << np.array([16, 8, 0])).sum(-1).reshape(len(images), -1)
    light = (pixels.min(-1) > 140).reshape(len(images), -1)
    background = np.array([_commonest(row[keep]) for row, keep in zip(coded, light, strict=True)])
    return EasyPixels(pixels, (coded != background[:, None]).reshape(pixels.shape[:3]))


def _commonest(values: np.ndarray) -> int:
    unique, counts = np.unique(values, return_counts=True)
    return int(unique[np.argmax(counts)])


def resize(images: Tensor) -> Tensor:
    """As the image processor does it: uint8 [B, 3, h, w] -> uint8 [B, 3, 112, 112], bicubic."""
    from torchvision.transforms.v2 import functional as tv

    return tv.resize(images, [scenes.SIDE, scenes.SIDE], interpolation=tv.InterpolationMode.BICUBIC, antialias=True)


def easy_batch(
    images: list[EasyImage], pixels: EasyPixels, chosen: list[int], rng: random.Random | None
) -> tuple[Tensor, Labels]:
    """Resized pictures uint8 [B, 3, 112, 112] and labels; with `rng` each shape moves on a background of new tint."""
    labels = _blank_labels(len(chosen))
    out = np.empty((len(chosen), *pixels.images.shape[1:]), dtype=np.uint8)
    for i, index in enumerate(chosen):
        picture, mask = pixels.images[index], pixels.mask[index]
        ys, xs = np.nonzero(mask)
        dy = dx = 0
        if rng is not None:
            dy = rng.randint(-int(ys.min()), 63 - int(ys.max()))
            dx = rng.randint(-int(xs.min()), 63 - int(xs.max()))
            picture, mask = (np.roll(a, (dy, dx), (0, 1)) for a in (picture, mask))
            picture = np.where(mask[..., None], picture, np.array([rng.randint(228, 255) for _ in range(3)]))
        out[i] = picture
        box = (xs.min() + dx, ys.min() + dy, xs.max() + 1 + dx, ys.max() + 1 + dy)
        _label_easy(labels, i, images[index], tuple(float(edge) * scenes.SIDE / 64 for edge in box))
    return resize(torch.from_numpy(out).permute(0, 3, 1, 2)), labels


def _label_easy(labels: Labels, i: int, image: EasyImage, box: tuple[float, ...]) -> None:
    """box: left, top, right, bottom of the shape in pixels of the resized picture."""
    left, top, right, bottom = box
    x, y = (left + right) / 2, (top + bottom) / 2
    token = _token_at(x, y)
    labels.kind[i, token] = 1
    labels.order[i, token] = 0
    labels.count[i] = 1
    # Scenes draw small things with radii up to 9.5 pixels and large ones from 13.
    labels.size[i, token] = int(max(right - left, bottom - top) > 22.5)
    third = scenes.SIDE / 3
    labels.region[i, token] = int(y // third) * 3 + int(x // third)
    if image.shape:
        labels.shape[i, token] = scenes.SHAPES.index(image.shape)
        labels.shape_counts[i, scenes.SHAPES.index(image.shape)] = 1
    else:
        labels.shape_counts[i] = IGNORE
    if image.color:
        labels.color[i, token] = COLOR_NAMES.index(image.color)
        labels.color_counts[i, COLOR_NAMES.index(image.color)] = 1
    else:
        labels.color_counts[i] = IGNORE
