"""Training data for the drafter: prompts, the target's own answers, and the hidden states it had on the way.

A drafter has to guess what *this* target says next, so the target answers every prompt itself (greedy for most,
temperature 0.7 for some). The states of the captured layers fall out of that generation for free and are
stored beside the tokens: computing them again would cost as much as half of the generation.

Shards are independent of each other: shard ``i`` depends on the seed and ``i`` alone, so a run can stop
at any time, and a restart continues after the last complete shard with identical results.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import logging
import os
import random
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

log = logging.getLogger(__name__)

PROMPTS_FILE = Path(__file__).parent.parent / "demo" / "assets" / "prompts.json"
# One prompt text in this many is held out of training, chosen by its hash.
HELD_OUT_EVERY = 20
KINDS = (
    "explain", "list", "story", "email", "translate", "summarise", "math", "code", "answer", "scene", "image",
)  # fmt: skip
DATASET_FILE = "dataset.json"


# ---------------------------------------------------------------- prompts


@dataclass(frozen=True)
class Prompt:
    """One user message. kind: an entry of KINDS. held_out: never trained on."""

    text: str
    kind: str

    @property
    def held_out(self) -> bool:
        return int(hashlib.sha256(self.text.encode()).hexdigest()[:8], 16) % HELD_OUT_EVERY == 0


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
        prompts.append(Prompt(text, kind))
    return prompts


# ---------------------------------------------------------------- the target's language tower


@dataclass(frozen=True)
class TowerDims:
    """What the forward pass has to know, read from the checkpoint's config.json."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    rope_theta: float
    rms_norm_eps: float
    mrope_section: tuple[int, ...]

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def read_dims(target_dir: Path) -> TowerDims:
    """Language-tower sizes of a Qwen2.5-VL checkpoint."""
    config = json.loads((target_dir / "config.json").read_text())
    text = config.get("text_config", config)
    rope = text["rope_parameters"]
    return TowerDims(
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        num_layers=text["num_hidden_layers"],
        num_heads=text["num_attention_heads"],
        num_kv_heads=text["num_key_value_heads"],
        rope_theta=rope["rope_theta"],
        rms_norm_eps=text["rms_norm_eps"],
        mrope_section=tuple(rope["mrope_section"]),
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in the half-split (neox) layout. x: [..., D]; cos, sin: broadcast to [..., D / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@dataclass
class KVCache:
    """Keys and values of a fixed number of slots. k, v: [layers, slots, kv_heads, capacity, head_dim]."""

    k: torch.Tensor
    v: torch.Tensor


class LanguageTower:
    """The target's language tower in plain float32 torch, for batched generation on a CPU.

    transformers' own generate pads the whole batch and stops only when its slowest row ends. Here a finished
    slot takes the next prompt at once, and the layers' outputs are handed out without a second pass.
    """

    def __init__(self, target_dir: Path, capture: Sequence[int] = ()) -> None:
        self.dims = read_dims(target_dir)
        self.capture = tuple(capture)
        raw = load_file(target_dir / "model.safetensors")
        weights = {k.removeprefix("model."): v.float() for k, v in raw.items() if not k.startswith("visual.")}
        self.embedding = weights["embed_tokens.weight"]
        self.head = weights.get("lm_head.weight", self.embedding)
        self.norm = weights["norm.weight"]
        self.layers = [self._layer(weights, i) for i in range(self.dims.num_layers)]
        half = self.dims.head_dim // 2
        self.inv_freq = self.dims.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
        # Which of the three M-RoPE coordinates (time, height, width) each rotary pair follows.
        self.section = torch.repeat_interleave(torch.arange(3), torch.tensor(self.dims.mrope_section))

    @staticmethod
    def _layer(weights: dict[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
        prefix = f"layers.{index}."
        own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        qkv = [own[f"self_attn.{p}_proj.weight"] for p in "qkv"]
        bias = [own[f"self_attn.{p}_proj.bias"] for p in "qkv"]
        return {
            "input_norm": own["input_layernorm.weight"],
            "post_norm": own["post_attention_layernorm.weight"],
            # Matrices are kept [in, out]: at a hundred rows, MKL multiplies by them about twice as fast as by
            # Linear's [out, in] layout, which it repacks on every call.
            "qkv": torch.cat(qkv).t().contiguous(),
            "qkv_bias": torch.cat(bias),
            "o": own["self_attn.o_proj.weight"].t().contiguous(),
            "gate": own["mlp.gate_proj.weight"].t().contiguous(),
            "up": own["mlp.up_proj.weight"].t().contiguous(),
            "down": own["mlp.down_proj.weight"].t().contiguous(),
        }

    def new_cache(self, slots: int, capacity: int) -> KVCache:
        """An empty cache of float32 keys and values."""
        d = self.dims
        shape = (d.num_layers, slots, d.num_kv_heads, capacity, d.head_dim)
        return KVCache(torch.zeros(shape), torch.zeros(shape))

    def forward(
        self,
        embeds: torch.Tensor,
        start: torch.Tensor,
        cache: KVCache,
        slots: slice | torch.Tensor,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run T new tokens of b slots and append them to the cache.

        embeds: [b, T, H]. start: [b], each row's cached length. positions: [3, b, T] M-RoPE coordinates, by
        default start + 0..T-1 in all three (text). Tokens beyond a row's real length may be padding: what they
        write is overwritten before any later query can see it.
        Returns the last layer's output before the final norm, [b, T, H], and the captured layers' outputs side
        by side, [b, T, len(capture) * H].
        """
        d = self.dims
        b, t, _ = embeds.shape
        index = start[:, None] + torch.arange(t)
        coordinates = index.expand(3, b, t) if positions is None else positions
        angle = coordinates[self.section].permute(1, 2, 0).float() * self.inv_freq
        cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
        length = int(index.max()) + 1
        visible = torch.arange(length) <= index[:, :, None]  # [b, T, length]
        mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
        # Query heads of one KV head are laid out as extra query rows, so K and V are never repeated.
        group = d.num_heads // d.num_kv_heads
        mask = mask[:, None, None].expand(b, 1, group, t, length).reshape(b, 1, group * t, length)
        rows = (torch.arange(cache.k.shape[1])[slots] if isinstance(slots, slice) else slots)[:, None]

        hidden, captured = embeds, []
        for i, w in enumerate(self.layers):
            x = rms_norm(hidden, w["input_norm"], d.rms_norm_eps)
            qkv = (x @ w["qkv"] + w["qkv_bias"]).view(b, t, -1, d.head_dim)
            q, k, v = qkv.split([d.num_heads, d.num_kv_heads, d.num_kv_heads], dim=2)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            cache.k[i][rows, :, index] = k
            cache.v[i][rows, :, index] = v
            # A view for slices, a copy for index tensors.
            k_all, v_all = cache.k[i][:, :, :length][slots], cache.v[i][:, :, :length][slots]
            q = q.view(b, t, d.num_kv_heads, group, d.head_dim).permute(0, 2, 3, 1, 4)
            q = q.reshape(b, d.num_kv_heads, group * t, d.head_dim)
            out = F.scaled_dot_product_attention(q, k_all, v_all, attn_mask=mask)
            out = out.view(b, d.num_kv_heads, group, t, d.head_dim).permute(0, 3, 1, 2, 4)
            hidden = hidden + out.reshape(b, t, -1) @ w["o"]
            x = rms_norm(hidden, w["post_norm"], d.rms_norm_eps)
            hidden = hidden + (F.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]
            if i in self.capture:
                captured.append(hidden)
        return hidden, torch.cat(captured, dim=-1) if captured else hidden[..., :0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (before the final norm): [..., H] -> [..., V]."""
        return F.linear(rms_norm(hidden, self.norm, self.dims.rms_norm_eps), self.head)


# ---------------------------------------------------------------- generation


@dataclass
class Conversation:
    """A prompt and the target's answer.

    tokens: prompt ids and then the answer's, the stop token included when it came. hidden: [len(tokens), K * H]
    bfloat16; the last token was never fed back, so its row is zero (no block ever needs it as context).
    """

    tokens: list[int]
    prompt_length: int
    temperature: float
    kind: str
    held_out: bool
    hidden: torch.Tensor = field(repr=False)


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
        width = tower.dims.hidden_size * len(tower.capture)
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
            _, captured = self.tower.forward(self.tower.embedding[ids][None], start, one, slice(0, 1))
            self.cache.k[:, :, :, :shared], self.cache.v[:, :, :, :shared] = one.k, one.v
            self.states[:, :shared] = captured[0].to(torch.bfloat16)
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
        self.states[rows, self.shared : longest] = captured.to(torch.bfloat16)
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
        self.states[rows, self.lengths[rows]] = captured[:, 0].to(torch.bfloat16)
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
                kind, held_out = job.prompt.kind, job.prompt.held_out
                self.results[index] = Conversation(text, len(job.ids), job.temperature, kind, held_out, states)
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


# ---------------------------------------------------------------- shards


def save_shard(path: Path, conversations: Sequence[Conversation]) -> None:
    """Write one shard atomically.

    tokens: int32 [N], all conversations end to end. offsets: int64 [n + 1]. prompt_lengths: int32 [n].
    temperatures: float32 [n]. kinds: int32 [n], indices into KINDS. held_out: bool [n]. hidden: bfloat16 [N, K * H].
    """
    lengths = torch.tensor([0] + [len(c.tokens) for c in conversations])
    tensors = {
        "tokens": torch.tensor([t for c in conversations for t in c.tokens], dtype=torch.int32),
        "offsets": lengths.cumsum(0),
        "prompt_lengths": torch.tensor([c.prompt_length for c in conversations], dtype=torch.int32),
        "temperatures": torch.tensor([c.temperature for c in conversations]),
        "kinds": torch.tensor([KINDS.index(c.kind) for c in conversations], dtype=torch.int32),
        "held_out": torch.tensor([c.held_out for c in conversations]),
        "hidden": torch.cat([c.hidden for c in conversations]).to(torch.bfloat16),
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    os.replace(partial, path)


def load_shard(path: Path) -> list[Conversation]:
    """The conversations of one shard; their hidden states stay in the memory-mapped file."""
    t = load_file(path)
    offsets = t["offsets"].tolist()
    return [
        Conversation(
            tokens=t["tokens"][a:b].tolist(),
            prompt_length=int(t["prompt_lengths"][i]),
            temperature=float(t["temperatures"][i]),
            kind=KINDS[int(t["kinds"][i])],
            held_out=bool(t["held_out"][i]),
            hidden=t["hidden"][a:b],
        )
        for i, (a, b) in enumerate(itertools.pairwise(offsets))
    ]


def shard_paths(data_dir: Path) -> list[Path]:
    """Complete shards in order."""
    return sorted(data_dir.glob("shard-*.safetensors"))


def default_capture_layers(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """``count`` layers from the second to the third last, evenly spread: DFlash's own choice.

    A tiny target gets fewer. Layer i means the residual stream *after* layer i, as SGLang reads ``target_layer_ids``.
    """
    if count == 1:
        return (num_layers // 2,)
    # The output of the very last layer cannot be captured (SGLang reads layer i's output as layer i + 1's input).
    first, last = (1, num_layers - 3) if num_layers >= 6 else (0, num_layers - 2)
    return tuple(sorted({round(first + i * (last - first) / (count - 1)) for i in range(count)}))


@dataclass(frozen=True)
class DataOptions:
    """Everything a shard's content depends on, besides its index."""

    seed: int = 0
    per_shard: int = 160
    max_new: int = 128
    long_max_new: int = 192
    long_every: int = 5
    sampled_share: float = 0.33
    temperature: float = 0.7
    capture: tuple[int, ...] = ()
    target: str = ""


def make_jobs(prompts: Sequence[Prompt], tokenizer: Any, options: DataOptions, shard: int) -> list[Job]:
    """Jobs of one shard. Random choices come from (seed, shard) alone."""
    rng = torch.Generator().manual_seed(options.seed * 1_000_003 + shard)
    jobs = []
    for i, prompt in enumerate(prompts):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}], add_generation_prompt=True, tokenize=False
        )
        max_new = options.long_max_new if i % options.long_every == 0 else options.max_new
        sampled = float(torch.rand((), generator=rng)) < options.sampled_share
        draws = torch.rand(max_new, generator=rng)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        jobs.append(Job(ids, prompt, options.temperature if sampled else 0.0, max_new, draws))
    return jobs


def target_fingerprint(target_dir: Path) -> str:
    """Short hash of the target's weights: data from one target must not train a drafter for another."""
    digest = hashlib.sha256()
    with (target_dir / "model.safetensors").open("rb") as handle:
        while chunk := handle.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()[:16]


def generate(
    target_dir: Path,
    out_dir: Path,
    *,
    num_shards: int,
    options: DataOptions,
    slots: int = 128,
    worker: tuple[int, int] = (0, 1),
    progress: bool = True,
) -> list[Path]:
    """Write shards 0..num_shards-1 that are missing; returns all shard paths.

    worker: (i, n) takes every n-th shard from i on. On a busy machine two single-threaded workers get more done
    than one with two threads, which waits for its slower thread after every matrix product.
    """
    from tqdm import tqdm
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    capture = options.capture or default_capture_layers(read_dims(target_dir).num_layers)
    options = DataOptions(**{**asdict(options), "capture": capture, "target": target_fingerprint(target_dir)})
    _claim_directory(out_dir, options)
    tower = LanguageTower(target_dir, capture)
    prompts = build_prompts(num_shards * options.per_shard, options.seed)
    stop_ids = [0, int(tokenizer.eos_token_id)]
    for shard in range(worker[0], num_shards, worker[1]):
        path = out_dir / f"shard-{shard:05d}.safetensors"
        if path.exists():
            continue
        jobs = make_jobs(prompts[shard * options.per_shard :][: options.per_shard], tokenizer, options, shard)
        began = time.monotonic()
        with tqdm(desc=path.stem, unit="tok", disable=not progress, mininterval=5) as bar:
            conversations = answer(tower, jobs, stop_ids=stop_ids, slots=slots, on_step=bar.update)
        save_shard(path, conversations)
        produced = sum(len(c.tokens) - c.prompt_length for c in conversations)
        seconds = time.monotonic() - began
        log.info(
            "%s: %d conversations, %d answer tokens, %.0f s, %.0f tokens/s",
            path.name, len(conversations), produced, seconds, produced / seconds,
        )  # fmt: skip
    return shard_paths(out_dir)


def _claim_directory(out_dir: Path, options: DataOptions) -> None:
    """Record the options, or refuse to mix shards made with different ones."""
    out_dir.mkdir(parents=True, exist_ok=True)
    record = out_dir / DATASET_FILE
    wanted = json.loads(json.dumps(asdict(options)))
    if record.exists():
        found = json.loads(record.read_text())
        if found != wanted:
            raise ValueError(f"{out_dir} holds data made with other options ({found}, not {wanted})")
        return
    record.write_text(json.dumps(wanted, indent=2) + "\n")


def read_options(data_dir: Path) -> DataOptions:
    """The options a data directory was made with."""
    raw = json.loads((data_dir / DATASET_FILE).read_text())
    return DataOptions(**{**raw, "capture": tuple(raw["capture"])})


# ---------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``d3tree data generate``."""
    parser.add_argument("--target", type=Path, default=Path(".cache/d3tree/target"), help="target checkpoint")
    parser.add_argument("--out", type=Path, default=Path(".cache/d3tree/data/text"), help="shard directory")
    parser.add_argument("--shards", type=int, default=6, help="number of shards")
    parser.add_argument("--per-shard", type=int, default=DataOptions.per_shard, help="conversations per shard")
    parser.add_argument("--max-new", type=int, default=DataOptions.max_new, help="answer tokens at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=int, default=128, help="conversations generated side by side")
    parser.add_argument("--worker", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="shards I, I+N, ...")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's own choice)")


def run(args: argparse.Namespace) -> int:
    """Generate what is missing."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    if args.threads:
        torch.set_num_threads(args.threads)
    options = DataOptions(
        seed=args.seed, per_shard=args.per_shard, max_new=args.max_new, long_max_new=args.max_new * 3 // 2
    )
    paths = generate(
        args.target, args.out, num_shards=args.shards, options=options, slots=args.slots, worker=tuple(args.worker)
    )
    log.info("%d shards in %s", len(paths), args.out)
    return 0


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(_parser)
    raise SystemExit(run(_parser.parse_args()))
