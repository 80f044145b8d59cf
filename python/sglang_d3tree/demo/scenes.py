"""Rendered scenes: what the demo verifier learns to see, and the words for it.

A `Scene` is a handful of symbols (shapes with colour, size and region, perhaps a printed word or digit). Everything
else follows from it: the picture (`render`), the texts a good answer contains (`describe`, `list_shapes`, `as_json`,
`questions`) and the marks for an answer (`grade_description`). Whether a scene may be trained on is a property of its
symbols (`is_held_out`), so no held-out scene can reappear in training under another seed.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache

from PIL import Image, ImageDraw, ImageFont

SIDE = 112
"""Pixels per side; with patches of 14 and a 2x2 merge an image is 16 tokens."""

SHAPES = ("circle", "rectangle", "triangle", "star", "cross")
COLORS = {
    "red": (240, 10, 10),
    "green": (10, 240, 10),
    "blue": (10, 10, 240),
    "yellow": (245, 240, 10),
    "black": (8, 8, 8),
    "gray": (128, 128, 128),
    "teal": (0, 128, 128),
    "brown": (165, 42, 42),
}
SIZES = ("small", "large")
REGIONS = (
    "top left", "top", "top right",
    "left", "center", "right",
    "bottom left", "bottom", "bottom right",
)  # fmt: skip
WORDS = ("cat", "dog", "sun", "sea", "tea", "car", "bus", "box", "map", "key", "hat", "ice")
DIGITS = tuple("0123456789")
NUMBERS = ("zero", "one", "two", "three", "four")
ORDINALS = ("first", "second", "third", "fourth")
MAX_THINGS = len(ORDINALS)

DESCRIBE_PROMPTS = ("Describe the image.", "What do you see in this picture?", "Tell me what is in the image.")
LIST_PROMPTS = ("List the shapes in the image.", "List all the shapes, one per line.")
JSON_PROMPTS = ("Answer in JSON: which shapes are in the image?", "Give the shapes in the image as JSON.")


@dataclass(frozen=True, order=True)
class Thing:
    """One drawn shape. `region` indexes `REGIONS`; a scene has at most one thing (or the text) per region."""

    region: int
    shape: str
    color: str
    size: str

    @property
    def name(self) -> str:
        return f"{self.size} {self.color} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """Things in reading order (by region), and perhaps one printed word or digit in a region of its own."""

    things: tuple[Thing, ...]
    text: str | None = None
    text_region: int | None = None

    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Chat:
    """One question about an image and the answer the verifier should give; `kind` names the answer's form."""

    kind: str
    prompt: str
    answer: str


# --- sampling -------------------------------------------------------------------------------------------------------


def is_held_out(scene: Scene) -> bool:
    """One scene in ten, chosen by a hash of its symbols, is never trained on."""
    return hashlib.sha256(scene.key().encode()).digest()[0] < 26


def sample_scene(rng: random.Random) -> Scene:
    count = rng.choices((1, 2, 3, 4), weights=(2, 3, 3, 2))[0]
    regions = rng.sample(range(len(REGIONS)), count + 1)
    things = tuple(
        sorted(
            Thing(region, rng.choice(SHAPES), rng.choice(tuple(COLORS)), rng.choice(SIZES))
            for region in regions[:count]
        )
    )
    if rng.random() < 0.5:
        return Scene(things)
    text = rng.choice(WORDS) if rng.random() < 0.5 else rng.choice(DIGITS)
    return Scene(things, text, regions[count])


def scenes(seed: int, *, held_out: bool) -> Iterator[Scene]:
    """An endless, reproducible stream of scenes from one side of the split."""
    rng = random.Random(f"scenes-{seed}-{held_out}")
    while True:
        scene = sample_scene(rng)
        if is_held_out(scene) == held_out:
            yield scene


# --- drawing --------------------------------------------------------------------------------------------------------

_OVERSAMPLE = 2  # draw twice as large and shrink: antialiased edges


@dataclass(frozen=True)
class Picture:
    """A rendered scene. `centers[i]` is where thing i was drawn, in pixels; `text_box` is where the text went."""

    image: Image.Image
    centers: tuple[tuple[float, float], ...]
    text_box: tuple[float, float, float, float] | None


def render(scene: Scene, seed: int) -> Picture:
    """Draws the scene; `seed` decides what its symbols leave open (exact place, size, tint, angle, background)."""
    rng = random.Random(f"render-{seed}-{scene.key()}")
    side = SIDE * _OVERSAMPLE
    background = tuple(rng.randint(228, 255) for _ in range(3))
    image = Image.new("RGB", (side, side), background)
    draw = ImageDraw.Draw(image)
    centers = []
    for thing in scene.things:
        radius = rng.uniform(7.0, 9.5) if thing.size == "small" else rng.uniform(13.0, 16.0)
        x, y = _region_center(thing.region, rng, margin=radius + 1)
        centers.append((x, y))
        fill = tuple(min(255, max(0, channel + rng.randint(-14, 14))) for channel in COLORS[thing.color])
        _draw_thing(draw, thing.shape, x * _OVERSAMPLE, y * _OVERSAMPLE, radius * _OVERSAMPLE, fill, rng)
    text_box = None
    if scene.text is not None and scene.text_region is not None:
        text_box = _draw_text(draw, scene.text, scene.text_region, rng)
    return Picture(image.reduce(_OVERSAMPLE), tuple(centers), text_box)


def _region_center(region: int, rng: random.Random, margin: float) -> tuple[float, float]:
    """A point near the middle of the region's third of the picture, `margin` away from the borders."""
    third = SIDE / 3
    x = third * (region % 3 + 0.5) + rng.uniform(-4, 4)
    y = third * (region // 3 + 0.5) + rng.uniform(-4, 4)
    return min(max(x, margin), SIDE - margin), min(max(y, margin), SIDE - margin)


def _draw_thing(
    draw: ImageDraw.ImageDraw, shape: str, x: float, y: float, r: float, fill: tuple[int, ...], rng: random.Random
) -> None:
    turn = rng.uniform(-0.15, 0.15)

    def ring(radii: list[float], start: float) -> list[tuple[float, float]]:
        step = 2 * math.pi / len(radii)
        return [
            (x + radius * math.sin(start + i * step), y - radius * math.cos(start + i * step))
            for i, radius in enumerate(radii)
        ]

    if shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    elif shape == "rectangle":
        short = r * rng.uniform(0.45, 0.9)
        half_w, half_h = (r, short) if rng.random() < 0.5 else (short, r)
        draw.rectangle((x - half_w, y - half_h, x + half_w, y + half_h), fill=fill)
    elif shape == "triangle":
        draw.polygon(ring([r * 1.1] * 3, turn), fill=fill)
    elif shape == "star":
        draw.polygon(ring([r * 1.1, r * 0.45] * 5, turn), fill=fill)
    elif shape == "cross":
        arm = r * rng.uniform(0.25, 0.35)
        draw.rectangle((x - r, y - arm, x + r, y + arm), fill=fill)
        draw.rectangle((x - arm, y - r, x + arm, y + r), fill=fill)
    else:
        raise ValueError(f"unknown shape {shape!r}")


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own embedded font: the same letters on every machine."""
    return ImageFont.load_default(size)


def _draw_text(
    draw: ImageDraw.ImageDraw, text: str, region: int, rng: random.Random
) -> tuple[float, float, float, float]:
    size = rng.randint(26, 32) if text in DIGITS else rng.randint(17, 20)
    font = _font(size * _OVERSAMPLE)
    left, top, right, bottom = (value / _OVERSAMPLE for value in draw.textbbox((0, 0), text, font=font))
    width, height = right - left, bottom - top
    x, y = _region_center(region, rng, margin=max(width, height) / 2 + 1)
    x0, y0 = x - width / 2, y - height / 2
    shade = rng.randint(0, 60)
    draw.text(((x0 - left) * _OVERSAMPLE, (y0 - top) * _OVERSAMPLE), text, font=font, fill=(shade, shade, shade))
    return x0, y0, x0 + width, y0 + height


# --- words ----------------------------------------------------------------------------------------------------------


def _count_sentence(count: int) -> str:
    return "There is one shape." if count == 1 else f"There are {NUMBERS[count]} shapes."


def _text_sentence(scene: Scene) -> str:
    if scene.text is None or scene.text_region is None:
        return "No text is printed."
    noun = "digit" if scene.text in DIGITS else "word"
    return f"The {noun} {scene.text} is printed at the {REGIONS[scene.text_region]}."


def describe(scene: Scene) -> str:
    """The description the verifier is taught. Ordinals give a small language model something to count along."""
    things = (
        f"The {ordinal} is a {thing.name} at the {REGIONS[thing.region]}."
        for ordinal, thing in zip(ORDINALS, scene.things, strict=False)
    )
    return " ".join((_count_sentence(len(scene.things)), *things, _text_sentence(scene)))


def list_shapes(scene: Scene) -> str:
    return "\n".join(f"{i}. {thing.name}" for i, thing in enumerate(scene.things, 1))


def as_json(scene: Scene) -> str:
    shapes = [{"size": t.size, "color": t.color, "shape": t.shape} for t in scene.things]
    return json.dumps({"count": len(shapes), "shapes": shapes, "text": scene.text})


def long_chats(scene: Scene, rng: random.Random) -> list[Chat]:
    """The three written forms, each under one of its prompts."""
    return [
        Chat("describe", rng.choice(DESCRIBE_PROMPTS), describe(scene)),
        Chat("list", rng.choice(LIST_PROMPTS), list_shapes(scene)),
        Chat("json", rng.choice(JSON_PROMPTS), as_json(scene)),
    ]


def questions(scene: Scene, rng: random.Random) -> list[Chat]:
    """Short questions with one right answer each, as many as the scene allows, in random order."""
    shapes = Counter(thing.shape for thing in scene.things)
    colors = Counter(thing.color for thing in scene.things)
    chats = [Chat("count", "How many shapes are there?", NUMBERS[len(scene.things)])]
    shape = rng.choice(SHAPES)
    chats.append(Chat("count", f"How many {_plural(shape)} are there?", NUMBERS[shapes[shape]]))
    for thing in scene.things:
        if shapes[thing.shape] == 1:
            chats.append(Chat("color", f"What color is the {thing.shape}?", thing.color))
        if colors[thing.color] == 1:
            chats.append(Chat("shape", f"What is the {thing.color} shape?", thing.shape))
    thing = rng.choice(scene.things)
    chats.append(Chat("place", f"What is at the {REGIONS[thing.region]}?", thing.name))
    some = rng.choice(scene.things)
    asked = (some.color, some.shape) if rng.random() < 0.5 else (rng.choice(tuple(COLORS)), rng.choice(SHAPES))
    there = any((t.color, t.shape) == asked for t in scene.things)
    chats.append(Chat("exists", f"Is there a {asked[0]} {asked[1]}?", "yes" if there else "no"))
    chats.append(Chat("text", "What text is printed?", scene.text or "none"))
    rng.shuffle(chats)
    return chats


def _plural(shape: str) -> str:
    return f"{shape}es" if shape == "cross" else f"{shape}s"


# --- marks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grade:
    """What a description got right. Shapes and colours are compared as multisets: each named as often as drawn."""

    shapes: bool
    colors: bool
    count: bool
    pairs: bool
    """Every colour stands with its own shape."""

    @property
    def all(self) -> bool:
        return self.shapes and self.colors and self.count and self.pairs


def grade_description(scene: Scene, text: str) -> Grade:
    lowered = text.lower()
    named_shapes = Counter(re.findall(rf"\b({'|'.join(SHAPES)})\b", lowered))
    named_colors = Counter(re.findall(rf"\b({'|'.join(COLORS)})\b", lowered))
    named_pairs = Counter(re.findall(rf"\b({'|'.join(COLORS)}) ({'|'.join(SHAPES)})\b", lowered))
    stated = re.search(rf"there (?:is|are) ({'|'.join(NUMBERS)}) shape", lowered)
    return Grade(
        shapes=named_shapes == Counter(thing.shape for thing in scene.things),
        colors=named_colors == Counter(thing.color for thing in scene.things),
        count=stated is not None and stated[1] == NUMBERS[len(scene.things)],
        pairs=named_pairs == Counter((thing.color, thing.shape) for thing in scene.things),
    )
