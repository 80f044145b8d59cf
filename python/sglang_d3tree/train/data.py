"""Training data for the drafter: built-in prompts, answered by the target itself.

Shards are independent of each other: shard ``i`` depends on the seed and ``i`` alone, so a run can stop
at any time, and a restart continues after the last complete shard with identical results.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sglang_d3tree.train.answers import Job, answer, load_image_model, prepare_image
from sglang_d3tree.train.image_prompts import ImageQuestion, image_questions
from sglang_d3tree.train.prompts import Prompt, build_prompts
from sglang_d3tree.train.shards import DataOptions, claim_directory, save_shard, shard_paths
from sglang_d3tree.train.tower import LanguageTower, default_capture_layers, read_dims

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Draws:
    """The random choices of one shard, from (seed, shard) alone: one temperature and row of numbers per prompt."""

    options: DataOptions
    shard: int

    def __iter__(self) -> Iterator[tuple[float, int, torch.Tensor]]:
        """(temperature, longest answer, uniform numbers) of one prompt after the other."""
        options = self.options
        rng = torch.Generator().manual_seed(options.seed * 1_000_003 + self.shard)
        for i in itertools.count():
            max_new = options.long_max_new if i % options.long_every == 0 else options.max_new
            sampled = float(torch.rand((), generator=rng)) < options.sampled_share
            yield options.temperature if sampled else 0.0, max_new, torch.rand(max_new, generator=rng)


def make_jobs(prompts: Sequence[Prompt], tokenizer: Any, draws: Draws) -> list[Job]:
    """Jobs of one shard of text prompts."""
    jobs = []
    for prompt, (temperature, max_new, uniform) in zip(prompts, draws, strict=False):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}], add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        jobs.append(Job(ids, prompt, temperature, max_new, uniform))
    return jobs


def make_image_jobs(questions: Sequence[ImageQuestion], target_dir: Path, draws: Draws) -> list[Job]:
    """Jobs of one shard of questions about images."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(target_dir)
    model = load_image_model(target_dir)
    jobs = []
    for question, (temperature, max_new, uniform) in zip(questions, draws, strict=False):
        ids, image = prepare_image(model, processor, question.image, question.prompt.text)
        jobs.append(Job(ids, question.prompt, temperature, max_new, uniform, image))
    return jobs


def target_fingerprint(target_dir: Path, vision: bool = False) -> str:
    """Short hash of the target: data from one must not train a drafter for another.

    vision: whether the vision tower counts. Without it, text answers stay valid when the tower is trained further.
    """
    digest = hashlib.sha256()
    for name, value in sorted(load_file(target_dir / "model.safetensors").items()):
        if vision or not name.startswith("visual."):
            digest.update(name.encode())
            digest.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def generate(
    target_dir: Path,
    out_dir: Path,
    *,
    num_shards: int,
    options: DataOptions,
    images: bool = False,
    dtype: torch.dtype = torch.float32,
    slots: int = 128,
    worker: tuple[int, int] = (0, 1),
    progress: bool = True,
) -> list[Path]:
    """Write shards 0..num_shards-1 that are missing; returns all shard paths.

    images: ask about images instead of text. dtype: of the target's matrices, see ``LanguageTower``.
    worker: (i, n) takes every n-th shard from i on. On a busy machine two single-threaded workers get more done
    than one with two threads, which waits for its slower thread after every matrix product.
    """
    from tqdm import tqdm
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    capture = options.capture or default_capture_layers(read_dims(target_dir).num_layers)
    options = DataOptions(**{**asdict(options), "capture": capture, "target": target_fingerprint(target_dir, images)})
    claim_directory(out_dir, options)
    tower = LanguageTower(target_dir, capture, dtype)
    prompts = [] if images else build_prompts(num_shards * options.per_shard, options.seed)
    stop_ids = [0, int(tokenizer.eos_token_id)]
    for shard in range(worker[0], num_shards, worker[1]):
        path = out_dir / f"shard-{shard:05d}.safetensors"
        if path.exists():
            continue
        draws = Draws(options, shard)
        if images:
            questions = image_questions(options.per_shard, options.seed * 1_000_003 + shard)
            jobs = make_image_jobs(questions, target_dir, draws)
        else:
            jobs = make_jobs(prompts[shard * options.per_shard :][: options.per_shard], tokenizer, draws)
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``d3tree data generate``."""
    parser.add_argument("--target", type=Path, default=Path(".cache/d3tree/target"), help="target checkpoint")
    parser.add_argument("--prompts", choices=("text", "image"), default="text", help="which built-in prompts")
    parser.add_argument("--out", type=Path, default=None, help="shard directory (.cache/d3tree/data/PROMPTS)")
    parser.add_argument("--shards", type=int, default=6, help="number of shards")
    parser.add_argument("--per-shard", type=int, default=DataOptions.per_shard, help="conversations per shard")
    parser.add_argument("--max-new", type=int, default=DataOptions.max_new, help="answer tokens at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the target's matrices"
    )
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
    out = args.out or Path(".cache/d3tree/data") / args.prompts
    paths = generate(
        args.target,
        out,
        num_shards=args.shards,
        options=options,
        images=args.prompts == "image",
        dtype=getattr(torch, args.dtype),
        slots=args.slots,
        worker=tuple(args.worker),
    )
    log.info("%d shards in %s", len(paths), out)
    return 0


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(_parser)
    raise SystemExit(run(_parser.parse_args()))
