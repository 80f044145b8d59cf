"""`d3tree train vision`: the demo verifier's vision tower, from nothing, on a CPU.

Four stages, each resumable by the same command; a finished stage is skipped:

1. `pretrain`: see, without the language model (heads name shapes, colours, letters);
2. `codes`: find out what to tell the frozen language model, without pixels;
3. `transfer`: regress the tower onto the codes, still without the language model;
4. `align`: train the tower through the language model.

`--evaluate` marks the latest state on easy-VQA's test split and held-out scenes, `--export` writes it in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_d3tree.demo.gallery import Verifier
from sglang_d3tree.train import vision_evaluate as evaluation
from sglang_d3tree.train.vision_align import Teacher, lesson, teach
from sglang_d3tree.train.vision_chat import ChatWriter
from sglang_d3tree.train.vision_codes import CodeBook
from sglang_d3tree.train.vision_data import Labels
from sglang_d3tree.train.vision_language import load_language, read_prefix
from sglang_d3tree.train.vision_loop import OutOfTimeError, train
from sglang_d3tree.train.vision_pretrain import Heads, Images, head_accuracies, head_losses, pretrain_step
from sglang_d3tree.train.vision_tower import build_tower, export, look, patchify

ASSET = Path(__file__).parents[1] / "demo" / "assets" / "vision.safetensors"
TRANSFER_HEADS = 0.1
"""Weight of the heads' losses beside the regression onto the codes, whose error is a share of their variance."""
ALIGN_TRANSFER, ALIGN_EXTRA_IMAGES = 0.3, 24
"""Aligning goes on with the regression, on this many more images a step: cheap, and it keeps the tower's eyes open."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", type=Path, default=Path(".cache/d3tree/target"), help="verifier checkpoint")
    parser.add_argument("--work", type=Path, default=Path(".cache/d3tree/vision"), help="checkpoints and logs")
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the language tower's frozen matrices; bfloat16 halves the time on CPUs with bfloat16 dot products",
    )
    parser.add_argument("--minutes", type=float, default=None, help="stop (resumably) after this long")
    parser.add_argument("--batch", type=int, default=64, help="images per step where no language model runs")
    for name, steps in (("pretrain", 700), ("codes", 400), ("transfer", 600), ("align", 600)):
        parser.add_argument(f"--{name}-steps", type=int, default=steps)
    parser.add_argument("--scenes-per-step", type=int, default=2, help="of a step through the language model")
    parser.add_argument("--easy-per-step", type=int, default=3, help="easy-VQA images, likewise")
    parser.add_argument("--evaluate", choices=("tower", "codes", "target"), default=None, help="mark it, train nothing")
    parser.add_argument("--limit", type=int, default=None, help="evaluate on this many images of each kind")
    parser.add_argument("--export", nargs="?", type=Path, const=ASSET, default=None, help="write the tower, bfloat16")


def load_teacher(checkpoint: Path, dtype: str = "float32") -> Teacher:
    lm, writer = load_language(checkpoint, getattr(torch, dtype)), ChatWriter.load(checkpoint)
    return Teacher(lm, writer, read_prefix(lm, writer.prefix))


def _restore(args: argparse.Namespace, stage: str, **modules: torch.nn.Module) -> int:
    """Loads what an earlier stage left; returns its step count."""
    state = torch.load(args.work / f"{stage}.pt", weights_only=True)
    for name, module in modules.items():
        module.load_state_dict(state[name])
    return int(state["step"])


def pretrain(args: argparse.Namespace, deadline: float | None) -> None:
    tower = build_tower(args.target, args.seed)
    heads = Heads(tower.config.out_hidden_size)
    source = Images.load(args.seed)

    def step(number: int) -> tuple[Tensor, dict[str, float]]:
        return pretrain_step(tower, heads, *source.mixed(number, args.batch))

    modules = {"tower": tower, "heads": heads}
    rates = dict.fromkeys(modules, 1e-3)
    train(args.work / "pretrain.pt", modules, rates, args.pretrain_steps, step, deadline=deadline)


def learn_codes(args: argparse.Namespace, deadline: float | None) -> None:
    teacher = load_teacher(args.target, args.dtype)
    codes = CodeBook(teacher.lm.embed, teacher.writer.tokenizer)
    source = Images.load(args.seed)

    def step(number: int) -> tuple[Tensor, dict[str, float]]:
        todo = lesson(source, teacher.writer, number, args.scenes_per_step, args.easy_per_step, noise=False)
        return teach(teacher, codes(todo.labels), todo.chats)

    train(args.work / "codes.pt", {"codes": codes}, {"codes": 3e-3}, args.codes_steps, step, deadline=deadline)


def _regression(tokens: Tensor, wanted: Tensor) -> Tensor:
    """Squared error as a share of the codes' variance."""
    return (tokens - wanted).square().mean() / wanted.var().clamp(min=1e-8)


def transfer(args: argparse.Namespace, deadline: float | None) -> None:
    teacher = load_teacher(args.target)
    codes = CodeBook(teacher.lm.embed, teacher.writer.tokenizer)
    tower = build_tower(args.target, args.seed)
    heads = Heads(tower.config.out_hidden_size)
    _restore(args, "codes", codes=codes)
    first = _restore(args, "pretrain", tower=tower, heads=heads)
    source = Images.load(args.seed)

    def step(number: int) -> tuple[Tensor, dict[str, float]]:
        images, labels = source.mixed(first + number, args.batch)
        tokens = look(tower, patchify(images))
        logits = heads(tokens)
        error = _regression(tokens, codes(labels).detach())
        seen = torch.stack(list(head_losses(logits, labels).values())).sum()
        return error + TRANSFER_HEADS * seen, {"error": error.item(), **head_accuracies(logits, labels)}

    modules = {"tower": tower, "heads": heads}
    rates = dict.fromkeys(modules, 1e-3)
    train(args.work / "transfer.pt", modules, rates, args.transfer_steps, step, deadline=deadline)


def align(args: argparse.Namespace, deadline: float | None) -> None:
    teacher = load_teacher(args.target, args.dtype)
    codes = CodeBook(teacher.lm.embed, teacher.writer.tokenizer)
    tower = build_tower(args.target, args.seed)
    _restore(args, "codes", codes=codes)
    _restore(args, "transfer", tower=tower)
    # Other images than the earlier stages drew, and other questions than the codes were learned on.
    source = Images.load(args.seed + 1)

    def step(number: int) -> tuple[Tensor, dict[str, float]]:
        todo = lesson(source, teacher.writer, number, args.scenes_per_step, args.easy_per_step)
        images, labels = source.mixed(number, ALIGN_EXTRA_IMAGES)
        tokens = look(tower, patchify(torch.cat([todo.images, images])))
        error = _regression(tokens[len(todo.images) :], codes(labels).detach())
        loss, numbers = teach(teacher, tokens[: len(todo.images)], todo.chats)
        return loss + ALIGN_TRANSFER * error, {"answers": loss.item(), "error": error.item(), **numbers}

    train(args.work / "align.pt", {"tower": tower}, {"tower": 3e-4}, args.align_steps, step, deadline=deadline)


STAGES: dict[str, Callable[[argparse.Namespace, float | None], None]] = {
    "pretrain": pretrain,
    "codes": learn_codes,
    "transfer": transfer,
    "align": align,
}


def latest_tower(args: argparse.Namespace) -> tuple[Any, str, int]:
    """The tower of the furthest stage, that stage's name, and its steps."""
    tower = build_tower(args.target, args.seed)
    for stage in ("align", "transfer", "pretrain"):
        if (args.work / f"{stage}.pt").exists():
            return tower, stage, _restore(args, stage, tower=tower)
    raise FileNotFoundError(f"no trained tower in {args.work}: run `d3tree train vision` first")


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Marks "tower" (the latest checkpoint), "target" (the built verifier) or "codes" (labels instead of pixels)."""
    teacher = load_teacher(args.target)
    drawn = evaluation.held_out_scenes(args.limit or 300)
    scores: evaluation.Scores = {}
    tokens: evaluation.Tokens
    if args.evaluate == "codes":
        codes = CodeBook(teacher.lm.embed, teacher.writer.tokenizer)
        steps = _restore(args, "codes", codes=codes)
        what = f"codes, {steps} steps"

        def from_labels(images: Tensor, labels: Labels | None) -> Tensor:
            wanted: Tensor = codes(labels)
            return wanted

        tokens = from_labels

        easy = evaluation.easy_items_with_labels(args.limit)
    else:
        tower, stage, steps = latest_tower(args)
        what = f"{stage}, {steps} steps"
        if args.evaluate == "target":
            what = str(args.target)
            tower = Verifier(args.target).model.model.visual
        tokens = evaluation.tower_tokens(tower)
        easy = evaluation.easy_items(args.limit)
        scores |= evaluation.score_descriptions(Verifier(args.target, tower.state_dict()), drawn)
    scores |= evaluation.score_short(teacher, tokens, iter(easy), len(easy))
    scores |= evaluation.score_short(teacher, tokens, evaluation.scene_items(drawn), len(drawn))
    easy_all = evaluation.Tally()
    for kind in ("easy-yesno", "easy-name"):
        easy_all.right += scores[kind].right
        easy_all.total += scores[kind].total
    scores["easy-vqa test"] = easy_all
    print(f"{what}; {len(easy)} easy-VQA test images, {len(drawn)} held-out scenes")
    for name, tally in scores.items():
        print(f"{name:18} {tally}")
    result = {"what": what, "scores": {name: asdict(tally) for name, tally in scores.items()}}
    (args.work / f"evaluation-{args.evaluate}.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    deadline = time.time() + 60 * args.minutes if args.minutes else None
    if args.evaluate:
        evaluate(args)
    elif args.export:
        tower, stage, steps = latest_tower(args)
        notes = {"command": "d3tree train vision", "seed": args.seed, "stage": stage, "steps": steps}
        data = "easy-vqa 1.0 train split (MIT), rendered scenes (sglang_d3tree.demo.scenes)"
        export(tower, args.export, {**notes, "data": data})
        print(f"{args.export}: {stage}, {steps} steps, {args.export.stat().st_size / 1e6:.1f} MB")
    else:
        try:
            for name in args.stages:
                STAGES[name](args, deadline)
        except OutOfTimeError:
            print("out of time; the same command carries on")
    return 0


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(_parser)
    raise SystemExit(run(_parser.parse_args()))
