"""Text prompts from built-in templates: varied enough to make the target say many different things."""

from __future__ import annotations

import hashlib
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

PROMPTS_FILE = Path(__file__).parent.parent / "demo" / "assets" / "prompts.json"
# One prompt text in this many is held out of training, chosen by its hash.
HELD_OUT_EVERY = 20
KINDS = (
    "explain", "list", "story", "email", "translate", "summarise", "math", "code", "answer", "scene",
    "image-long", "image-short",
)  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """One user message. kind: an entry of KINDS. held_out: never trained on."""

    text: str
    kind: str
    held_out: bool


def is_held_out(text: str) -> bool:
    """Whether a text prompt is kept from training."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) % HELD_OUT_EVERY == 0


_SLOT = re.compile(r"\{(\w+)\}")


def _fill(template: str, slots: dict[str, list[str]], rng: random.Random) -> str:
    """Replace every ``{slot}`` by a random entry, also inside entries."""

    def draw(match: re.Match[str]) -> str:
        name = match.group(1)
        if name == "int":
            return str(rng.randint(2, 30))
        if name == "big":
            return str(rng.randint(31, 400))
        return _fill(rng.choice(slots[name]), slots, rng)

    return _SLOT.sub(draw, template)


def build_prompts(count: int, seed: int) -> list[Prompt]:
    """``count`` different prompts from the built-in templates, in random order; longer lists extend shorter ones."""
    source = json.loads(PROMPTS_FILE.read_text())
    rng = random.Random(seed)
    kinds, weights = zip(*source["weights"].items(), strict=True)
    seen: set[str] = set()
    prompts: list[Prompt] = []
    misses = 0
    while len(prompts) < count:
        kind = rng.choices(kinds, weights)[0]
        text = _fill(rng.choice(source["templates"][kind]), source["slots"], rng)
        if text in seen:
            misses += 1
            if misses > 100 * count + 1000:
                raise ValueError(f"the templates do not yield {count} different prompts")
            continue
        seen.add(text)
        prompts.append(Prompt(text, kind, is_held_out(text)))
    return prompts
