"""Held-out prompts: texts, images drawn here, and prompts longer than a prefill chunk."""

from __future__ import annotations

import base64
import io
import random
from dataclasses import dataclass, field

from PIL import Image, ImageDraw

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@dataclass(frozen=True)
class Prompt:
    """A rendered chat prompt for ``/generate`` with its images as data URIs."""

    name: str
    text: str
    images: tuple[str, ...] = field(default=())

    def body(self) -> dict[str, object]:
        """Keywords of ``Server.generate`` next to the prompt text."""
        return {"image_data": list(self.images)} if self.images else {}


def user(text: str) -> str:
    """One user turn in the demo verifier's chat format."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def drawn(seed: int, width: int, height: int) -> Image.Image:
    """A picture of a few coloured shapes; other seeds give other pictures."""
    rng = random.Random(seed)
    colour = lambda: tuple(rng.randrange(256) for _ in range(3))  # noqa: E731
    image = Image.new("RGB", (width, height), colour())
    draw = ImageDraw.Draw(image)
    for shape in range(4):
        x, y = rng.randrange(width), rng.randrange(height)
        box = (x, y, x + rng.randrange(8, width), y + rng.randrange(8, height))
        (draw.rectangle if shape % 2 else draw.ellipse)(box, fill=colour())
    return image


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def data_uri(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


_QUESTIONS = (
    "What is the capital of Portugal?",
    "Name three fruits that are red.",
    "Write a short poem about a lighthouse.",
    "Explain why the sky is blue in two sentences.",
    "How do I boil an egg?",
    "Give me a list of five European rivers.",
    "Translate 'good morning' into French, Spanish and German.",
    "What is 17 plus 25?",
    "Write a Python function that reverses a string.",
    "Who wrote Romeo and Juliet?",
    "Describe the life cycle of a butterfly.",
    "What should I pack for a winter hike?",
    "Write a JSON object with a name, an age and a city.",
    "Summarise the story of Noah's ark in one paragraph.",
    "What are the planets of the solar system, in order?",
)

_FACTS = (
    "The harbour of the old town opens at six in the morning and closes when the last ferry has left. ",
    "A clock maker in the second street repairs watches that nobody else would touch. ",
    "On market days farmers bring apples, honey, cheese and bread from the villages in the hills. ",
    "The library keeps maps that show how the coast line has moved over three hundred years. ",
    "In the winter of 1929 the river froze and people walked across it with lanterns. ",
)

_ABOUT_IMAGES = (
    "What do you see?",
    "Which colours are in this picture?",
    "Describe the image in one sentence.",
    "How many shapes are there?",
    "Is there a circle in the picture?",
)

# Wide, tall, tiny and large, all resized by the processor.
_SIZES = ((64, 64), (200, 100), (96, 240), (300, 300), (31, 47), (640, 480))


def text_prompts() -> list[Prompt]:
    """22 texts; six are several prefill chunks of 64 tokens long."""
    prompts = [Prompt(f"question {i}", user(question)) for i, question in enumerate(_QUESTIONS)]
    for i in range(6):
        story = "".join(_FACTS[(i + j) % len(_FACTS)] for j in range(4 + 3 * i))
        prompts.append(Prompt(f"long {i}", user(f"{story}\nWhat happens in sentence {i + 1}?")))
    prompts.append(Prompt("plain text", "Once upon a time, in a village by the sea,"))
    return prompts


def image_prompts() -> list[Prompt]:
    """22 prompts with images: 16 with one, 4 with two, 2 behind a long text."""
    prompts = []
    for i in range(16):
        picture = data_uri(drawn(i, *_SIZES[i % len(_SIZES)]))
        question = _ABOUT_IMAGES[i % len(_ABOUT_IMAGES)]
        order = f"{IMAGE}{question}" if i % 3 else f"{question}{IMAGE}"
        prompts.append(Prompt(f"image {i}", user(order), (picture,)))
    for i in range(4):
        pair = tuple(data_uri(drawn(100 + 2 * i + j, *_SIZES[(i + j) % len(_SIZES)])) for j in range(2))
        text = f"First: {IMAGE} Second: {IMAGE} What is different?"
        prompts.append(Prompt(f"two images {i}", user(text), pair))
    for i in range(2):
        story = "".join(_FACTS) * (1 + i)
        picture = data_uri(drawn(200 + i, 128, 128))
        prompts.append(Prompt(f"long with image {i}", user(f"{story}{IMAGE}{story}Does the image fit?"), (picture,)))
    return prompts
