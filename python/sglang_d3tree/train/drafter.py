"""Trains the drafter on the target's own answers; stops and resumes at any time."""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sglang_d3tree.train.answers import Conversation
from sglang_d3tree.train.drafter_blocks import BlockBatch, ReducedHead, anchor_range, block_loss, make_blocks
from sglang_d3tree.train.drafter_checkpoint import (
    drafter_config,
    init_drafter,
    load_dflash_checkpoint,
    load_target_ends,
    new_drafter,
    save_dflash_checkpoint,
    warm_start,
)
from sglang_d3tree.train.drafter_model import DrafterConfig, DrafterModel
from sglang_d3tree.train.drafter_validation import Validation, evaluate, walk
from sglang_d3tree.train.shards import load_shard, read_options, shard_paths

log = logging.getLogger(__name__)

# Seconds: a step that took longer was paused from outside; the schedule by time must not jump ahead for it.
LONGEST_STEP = 20.0

# The names other modules use, so that the files behind them can move.
__all__ = [
    "DrafterConfig", "DrafterModel", "TrainOptions", "Trainer", "Validation", "add_arguments", "evaluate",
    "init_drafter", "load_dflash_checkpoint", "run", "save_dflash_checkpoint", "train", "walk",
]  # fmt: skip


@dataclass(frozen=True)
class TrainOptions:
    """Everything the run depends on besides data and target.

    steps: 0 trains for ``minutes`` of wall time instead (the schedule follows whichever is given).
    rows: block positions per step. short_share: share of the run that trains half-length blocks, which are
    cheaper and carry the early depths that matter most. dtype: of the matrix products; weights and optimiser stay in
    float32. start_from: directory of a drafter to train further, instead of ``warm`` or random weights.
    """

    seed: int = 0
    layers: int = 2
    block_size: int = 8
    warm: bool = True
    steps: int = 0
    minutes: float = 60.0
    conversations: int = 6
    rows: int = 1152
    short_share: float = 0.3
    varied_share: float = 0.25
    lr: float = 6e-4
    min_lr: float = 3e-5
    warmup_steps: int = 30
    weight_decay: float = 0.05
    clip: float = 1.0
    gamma: float = 4.0
    soft: float = 0.5
    ema: float = 0.99
    head_frequent: int = 4096
    head_sample: int = 512
    dtype: str = "float32"
    start_from: str = ""


def draw_block_size(options: TrainOptions, progress: float, generator: torch.Generator) -> int:
    """Block length of one step: short at first, then the full one, with some others mixed in.

    Serving may draft fewer positions than the training size (load) or a few more (BlockPilot's B + 2).
    """
    if progress < options.short_share:
        return max(2, options.block_size // 2)
    if float(torch.rand((), generator=generator)) < options.varied_share:
        return int(torch.randint(max(2, options.block_size // 2), options.block_size + 3, (), generator=generator))
    return options.block_size


def draw_batch(
    conversations: Sequence[Conversation],
    config: DrafterConfig,
    options: TrainOptions,
    block_size: int,
    rng: torch.Generator,
) -> BlockBatch:
    """Random conversations (by answer length) and random anchors in each."""
    sizes = torch.tensor([len(anchor_range(c)) for c in conversations], dtype=torch.float32)
    picks = torch.multinomial(sizes, options.conversations, replacement=True, generator=rng)
    rows = [conversations[i] for i in picks.tolist()]
    per_row = max(1, options.rows // block_size // len(rows))
    anchors = []
    for c in rows:
        span = anchor_range(c)
        order = torch.randperm(len(span), generator=rng)
        anchors.append(span.start + order[torch.arange(per_row) % len(span)])
    return make_blocks(rows, torch.stack(anchors), block_size, config.mask_token_id)


def frequent_tokens(conversations: Sequence[Conversation], count: int, vocab_size: int) -> torch.Tensor:
    """The most frequent tokens of the answers, most frequent first."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for c in conversations:
        counts += torch.bincount(torch.tensor(c.tokens[c.prompt_length :]), minlength=vocab_size)
    order = counts.argsort(descending=True, stable=True)[:count]
    return order[counts[order] > 0]


def load_conversations(data_dirs: Sequence[Path]) -> tuple[list[Conversation], list[Conversation]]:
    """(training, held-out) conversations of all complete shards, in order."""
    train: list[Conversation] = []
    held_out: list[Conversation] = []
    for data_dir in data_dirs:
        for path in shard_paths(data_dir):
            for c in load_shard(path):
                if len(anchor_range(c)):
                    (held_out if c.held_out else train).append(c)
    return train, held_out


class Trainer:
    """Model, average, optimiser and progress of one run; saved and restored as a whole."""

    def __init__(
        self, target_dir: Path, data_dirs: Sequence[Path], options: TrainOptions, rank: int = 0, world: int = 1
    ) -> None:
        self.options, self.data_dirs = options, list(data_dirs)
        self.rank, self.world = rank, world
        self.ends = load_target_ends(target_dir)
        capture = read_options(self.data_dirs[0]).capture
        config = drafter_config(
            target_dir, layers=options.layers, block_size=options.block_size, target_layer_ids=capture
        )
        self.model = new_drafter(config, options.seed)
        if options.start_from:
            self._start_from(Path(options.start_from))
        elif options.warm:
            warm_start(self.model, self.ends)
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.98))
        self.step, self.seconds = 0, 0.0
        self.refresh_data()

    def _start_from(self, checkpoint: Path) -> None:
        """Take another drafter's weights; its sizes and captured layers must be this run's."""
        other = load_dflash_checkpoint(checkpoint)
        if other.config != self.model.config:
            raise ValueError(f"--start-from {checkpoint}: its configuration is {other.config}, not {self.model.config}")
        self.model.load_state_dict(other.state_dict())

    def refresh_data(self) -> None:
        """Read the shards that exist now (generation may still be running beside the training)."""
        self.train_set, self.held_out = load_conversations(self.data_dirs)
        if not self.train_set:
            raise FileNotFoundError(f"no training shards in {', '.join(map(str, self.data_dirs))}")
        frequent = frequent_tokens(self.train_set, self.options.head_frequent, self.ends.head.shape[0])
        self.head = ReducedHead(self.ends.head, frequent, self.options.head_sample)

    @property
    def progress(self) -> float:
        """Share of the run that is done, 0..1."""
        o = self.options
        return self.step / o.steps if o.steps else self.seconds / (60 * o.minutes)

    def learning_rate(self) -> float:
        """Linear warm-up, then cosine down to ``min_lr``."""
        o = self.options
        if self.step < o.warmup_steps:
            return o.lr * (self.step + 1) / o.warmup_steps
        return o.min_lr + (o.lr - o.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, self.progress)))

    def loss(self, batch: BlockBatch, rng: torch.Generator) -> torch.Tensor:
        """What a step lowers."""
        o = self.options
        return block_loss(self.model, self.ends, self.head, batch, o.gamma, rng, o.soft, getattr(torch, o.dtype))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Everything that is trained."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def averages(self) -> list[tuple[nn.Module, nn.Module]]:
        """Modules that follow trained ones slowly, with those they follow."""
        return [(self.average, self.model)]

    def train_step(self) -> float:
        """One update; returns the loss. The batch depends on (seed, step, rank) alone, so resuming repeats nothing."""
        o, began = self.options, time.monotonic()
        rng = torch.Generator().manual_seed((o.seed * 1_000_003 + self.step) * self.world + self.rank)
        block_size = draw_block_size(o, self.progress, rng)
        batch = draw_batch(self.train_set, self.model.config, o, block_size, rng)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        loss = self.loss(batch, rng)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        seconds = self._share_gradients(min(time.monotonic() - began, LONGEST_STEP))
        nn.utils.clip_grad_norm_(self.parameters, o.clip)
        self.optimizer.step()
        self.step += 1
        decay = min(o.ema, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            for average, module in self.averages:
                for mean, p in zip(average.parameters(), module.parameters(), strict=True):
                    mean.lerp_(p, 1 - decay)
        self.seconds += seconds
        return float(loss.detach())

    def _share_gradients(self, seconds: float) -> float:
        """Average the gradients over the processes; returns the step's time, the same number in each of them.

        Schedule, validation and saving follow that time, so all processes take the same turns.
        """
        if self.world == 1:
            return seconds
        grads = [p.grad for p in self.parameters if p.grad is not None]
        flat = torch.cat([g.flatten() for g in grads] + [torch.tensor([seconds])])
        torch.distributed.all_reduce(flat)
        flat /= self.world
        for g, mean in zip(grads, flat.split([g.numel() for g in grads] + [1]), strict=False):
            g.copy_(mean.view_as(g))
        return float(flat[-1])

    def state(self) -> dict[str, Any]:
        """Everything that a run needs to go on."""
        return {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "options": asdict(self.options),
        }

    def save(self, path: Path) -> None:
        """Write the run's state atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(self.state(), partial)
        os.replace(partial, path)

    def restore(self, path: Path) -> None:
        """Continue a saved run; its schedule may be extended, its shape may not change."""
        state = torch.load(path, weights_only=True)
        for key in ("layers", "block_size", "seed"):
            if state["options"][key] != getattr(self.options, key):
                raise ValueError(f"{path} was trained with another {key}")
        self.load_state(state)

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of ``state``."""
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]


def train(
    target_dir: Path,
    data_dirs: Sequence[Path],
    run_dir: Path,
    options: TrainOptions,
    *,
    export_dir: Path | None = None,
    export_above: float = 1.6,
    validate_every: float = 300.0,
    save_every: float = 240.0,
    resume: bool = True,
    make: Callable[[Path, Sequence[Path], TrainOptions, int, int], Trainer] = Trainer,
) -> Iterator[dict[str, Any]]:
    """Train and yield a record per validation (first process only); the run's state lives in ``run_dir``.

    export_dir: receives the averaged weights whenever validation improves beyond ``export_above``. Intervals are
    seconds of training time. make: builds the trainer, where another loss is wanted. Under torchrun every process
    trains on its own blocks and gradients are averaged.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    trainer = make(target_dir, data_dirs, options, rank, world)
    state_path, curve = run_dir / "state.pt", run_dir / "curve.jsonl"
    if resume and state_path.exists():
        trainer.restore(state_path)
        log.info("continuing at step %d (%.0f s of training)", trainer.step, trainer.seconds)
    run_dir.mkdir(parents=True, exist_ok=True)
    validated = saved = trainer.seconds
    best, losses = export_above, []
    while trainer.progress < 1:
        losses.append(trainer.train_step())
        done = trainer.progress >= 1
        if trainer.seconds - saved > save_every or done:
            saved = trainer.seconds
            if rank == 0:
                trainer.save(state_path)
        if trainer.step % 20 == 0 and rank == 0:
            recent = sum(losses[-20:]) / len(losses[-20:])
            log.info(
                "step %d  %.1f%%  loss %.3f  lr %.1e  %.2f s/step",
                trainer.step, 100 * trainer.progress, recent, trainer.learning_rate(), trainer.seconds / trainer.step,
            )  # fmt: skip
        if trainer.seconds - validated > validate_every or done:
            validated = trainer.seconds
            trainer.refresh_data()
            if rank:
                continue
            result = evaluate(trainer.average, trainer.ends, trainer.held_out)
            record = {
                "step": trainer.step,
                "minutes": round(trainer.seconds / 60, 1),
                "loss": round(sum(losses) / len(losses), 4),
                "conversations": len(trainer.train_set),
                **asdict(result),
            }
            losses = []
            with curve.open("a") as handle:
                handle.write(json.dumps(record) + "\n")
            if result.tree > best and export_dir is not None:
                best = result.tree
                save_dflash_checkpoint(trainer.average, export_dir)
                record["exported"] = str(export_dir)
            yield record


# ---------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``d3tree train drafter``."""
    o = TrainOptions()
    parser.add_argument("--target", type=Path, default=Path(".cache/d3tree/target"), help="target checkpoint")
    parser.add_argument(
        "--data", type=Path, nargs="+", default=[Path(".cache/d3tree/data/text")], help="shard directories"
    )
    parser.add_argument("--run-dir", type=Path, default=Path(".cache/d3tree/train"), help="state and curve")
    parser.add_argument("--out", type=Path, default=Path(".cache/d3tree/drafter"), help="final checkpoint")
    parser.add_argument("--wip", type=Path, default=None, help="checkpoint updated whenever validation improves")
    parser.add_argument("--minutes", type=float, default=o.minutes, help="training time (with --steps 0)")
    parser.add_argument("--steps", type=int, default=o.steps, help="training steps (0: by time)")
    parser.add_argument("--seed", type=int, default=o.seed)
    parser.add_argument("--layers", type=int, default=o.layers)
    parser.add_argument("--block-size", type=int, default=o.block_size)
    parser.add_argument("--lr", type=float, default=o.lr)
    parser.add_argument("--rows", type=int, default=o.rows, help="block positions per step")
    parser.add_argument("--short-share", type=float, default=o.short_share, help="share of half-length blocks")
    parser.add_argument("--soft", type=float, default=o.soft, help="share of the loss on the target's distribution")
    parser.add_argument("--start-from", type=Path, default=None, help="drafter checkpoint to train further")
    parser.add_argument("--random-init", action="store_true", help="do not start from the target's last layers")
    parser.add_argument("--no-resume", action="store_true", help="ignore an earlier state in the run directory")
    parser.add_argument("--validate-every", type=float, default=300.0, help="seconds between validations")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's own choice)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default=o.dtype, help="of the matrix products while training"
    )


def run(args: argparse.Namespace) -> int:
    """Train (or continue), then write the averaged weights."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    if args.threads:
        torch.set_num_threads(args.threads)
    options = TrainOptions(
        seed=args.seed,
        layers=args.layers,
        block_size=args.block_size,
        warm=not args.random_init,
        steps=args.steps,
        minutes=args.minutes,
        lr=args.lr,
        rows=args.rows,
        short_share=args.short_share,
        soft=args.soft,
        dtype=args.dtype,
        start_from=str(args.start_from or ""),
    )
    records = train(
        args.target,
        args.data,
        args.run_dir,
        options,
        export_dir=args.wip,
        validate_every=args.validate_every,
        resume=not args.no_resume,
    )
    for record in records:
        log.info("validation %s", json.dumps(record))
    if int(os.environ.get("RANK", 0)):
        return 0
    return export(args.target, args.data, args.run_dir, args.out, options)


def export(target: Path, data: Sequence[Path], run_dir: Path, out: Path, options: TrainOptions) -> int:
    """Write the averaged weights of a run's last state and replay the held-out answers with them."""
    trainer = Trainer(target, data, options)
    trainer.restore(run_dir / "state.pt")
    save_dflash_checkpoint(trainer.average, out)
    report = walk(load_dflash_checkpoint(out), trainer.ends, trainer.held_out[:40])
    log.info("replay of held-out answers %s", json.dumps(report))
    (run_dir / "final.json").write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(_parser)
    raise SystemExit(run(_parser.parse_args()))
