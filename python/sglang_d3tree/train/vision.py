"""`d3tree train vision`: the demo verifier's vision tower, from nothing, on a CPU.

Four stages, each resumable by the same command; a finished stage is skipped:

1. `pretrain`: see, without the language model (heads name shapes, colours, letters);
2. `codes`: find out what to tell the language model, without pixels, while a small adapter of it learns to listen;
3. `transfer`: regress the tower onto the codes, still without the language model;
4. `polish`: train the tower through the language model, whose text (and any drafter of it) stays as it is.

`--evaluate` marks the latest state on easy-VQA's test split and held-out scenes, `--export` writes it in bfloat16.
Text ability stays by rehearsal (`vision_rehearsal`) on the target's own text.
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
from sglang_d3tree.train.vision_language import Adapter, load_language
from sglang_d3tree.train.vision_loop import OutOfTimeError, train
from sglang_d3tree.train.vision_pretrain import Heads, Images, pretrain_step
from sglang_d3tree.train.vision_regression import CodeError, fit_last_layer
from sglang_d3tree.train.vision_rehearsal import load_texts, perplexity, rehearse
from sglang_d3tree.train.vision_tower import build_tower, export, look, patchify

ASSET = Path(__file__).parents[1] / "demo" / "assets" / "vision.safetensors"
TRANSFER_NAMES = 0.3
"""Weight of telling labels apart beside the regression onto the codes, whose error is a share of their variance."""
FIT_BATCHES = 40
"""Batches for the last layer's closed form, and the first of them for the codes' variances."""
REHEARSAL = 1.0
"""Weight of the text's divergence (nats per token) beside the answers' loss."""
POLISH_TRANSFER, POLISH_EXTRA_IMAGES = 0.3, 64
"""Polishing goes on with the regression, on this many more images a step: cheap, and it keeps the tower's eyes open."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        type=Path,
        default=Path(".cache/d3tree/untrained"),
        help="verifier checkpoint to train from (`python -m sglang_d3tree.demo.target --untrained`)",
    )
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
    parser.add_argument("--adapter-rank", type=int, default=8, help="rank of the language tower's adapter")
    parser.add_argument(
        "--text", type=Path, default=None, help="shards of the target's own text to rehearse (`d3tree data generate`)"
    )
    parser.add_argument("--minutes", type=float, default=None, help="stop (resumably) after this long")
    parser.add_argument("--batch", type=int, default=64, help="images per step where no language model runs")
    for name, steps in (("pretrain", 1500), ("codes", 500), ("transfer", 700), ("polish", 80)):
        parser.add_argument(f"--{name}-steps", type=int, default=steps)
    parser.add_argument("--scenes-per-step", type=int, default=2, help="of a step through the language model")
    parser.add_argument("--easy-per-step", type=int, default=3, help="easy-VQA images, likewise")
    parser.add_argument("--evaluate", choices=("tower", "codes", "target"), default=None, help="mark it, train nothing")
    parser.add_argument("--limit", type=int, default=None, help="evaluate on this many images of each kind")
    parser.add_argument("--export", nargs="?", type=Path, const=ASSET, default=None, help="write the tower, bfloat16")


def load_teacher(checkpoint: Path, dtype: str = "float32") -> Teacher:
    return Teacher(load_language(checkpoint, getattr(torch, dtype)), ChatWriter.load(checkpoint))


def _rehearsal(args: argparse.Namespace, teacher: Teacher) -> Callable[[int], Tensor]:
    """step -> the loss that keeps the text as it was; zero without data."""
    if args.text is None:
        return lambda number: torch.zeros(())
    texts = load_texts(args.text, held_out=False)
    return lambda number: rehearse(teacher, texts, number)


def _restore_adapter(args: argparse.Namespace, teacher: Teacher) -> Adapter:
    """The adapter as the codes' stage left it, at work in the teacher."""
    teacher.adapter = Adapter(teacher.lm, args.adapter_rank, args.seed)
    _restore(args, "codes", adapter=teacher.adapter)
    return teacher.adapter


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
    adapter = teacher.adapter = Adapter(teacher.lm, args.adapter_rank, args.seed)
    codes = CodeBook(teacher.lm.embed, teacher.writer.tokenizer)
    source, rehearsal = Images.load(args.seed), _rehearsal(args, teacher)

    def step(number: int) -> tuple[Tensor, dict[str, float]]:
        todo = lesson(source, teacher.writer, number, args.scenes_per_step, args.easy_per_step, noise=False)
        loss, numbers = teach(teacher, codes(todo.labels), todo.chats)
        drift = rehearsal(number)
        return loss + REHEARSAL * drift, {"answers": loss.item(), "drift": drift.item(), **numbers}

    modules = {"codes": codes, "adapter": adapter}
    train(args.work / "codes.pt", modules, {"codes": 3e-3, "adapter": 1e-3}, args.codes_steps, step, deadline=deadline)


def _code_error(args: argparse.Namespace, teacher: Teacher, source: Images) -> CodeError:
    codes = CodeBook(teacher.lm.embed, teacher.writer.tokenizer)
    _restore(args, "codes", codes=codes)
    return CodeError(codes, source.mixed(0, 4 * args.batch)[1])


def transfer(args: argparse.Namespace, deadline: float | None) -> None:
    teacher, source = load_teacher(args.target), Images.load(args.seed)
    error_of = _code_error(args, teacher, source)
    tower = build_tower(args.target, args.seed)
    first = _restore(args, "pretrain", tower=tower)
    if not (args.work / "transfer.pt").exists():
        fit_last_layer(tower, error_of.codes, (source.mixed(first + i, args.batch) for i in range(FIT_BATCHES)))

    def step(number: int) -> tuple[Tensor, dict[str, float]]:
        images, labels = source.mixed(first + FIT_BATCHES + number, args.batch)
        tokens = look(tower, patchify(images))
        error = error_of(tokens, labels)
        names, accuracies = error_of.names(tokens, labels)
        return error + TRANSFER_NAMES * names, {"error": error.item(), **accuracies}

    train(args.work / "transfer.pt", {"tower": tower}, {"tower": 7e-4}, args.transfer_steps, step, deadline=deadline)


def polish(args: argparse.Namespace, deadline: float | None) -> None:
    teacher = load_teacher(args.target, args.dtype)
    _restore_adapter(args, teacher).requires_grad_(False)
    tower = build_tower(args.target, args.seed)
    _restore(args, "transfer", tower=tower)
    # Other images than the earlier stages drew, and other questions than the codes were learned on.
    source = Images.load(args.seed + 1)
    error_of = _code_error(args, teacher, source)

    def step(number: int) -> tuple[Tensor, dict[str, float]]:
        todo = lesson(source, teacher.writer, number, args.scenes_per_step, args.easy_per_step)
        images, labels = source.mixed(number, POLISH_EXTRA_IMAGES)
        tokens = look(tower, patchify(torch.cat([todo.images, images])))
        error = error_of(tokens[len(todo.images) :], labels)
        loss, numbers = teach(teacher, tokens[: len(todo.images)], todo.chats)
        return loss + POLISH_TRANSFER * error, {"answers": loss.item(), "error": error.item(), **numbers}

    train(args.work / "polish.pt", {"tower": tower}, {"tower": 4e-5}, args.polish_steps, step, deadline=deadline)


STAGES: dict[str, Callable[[argparse.Namespace, float | None], None]] = {
    "pretrain": pretrain,
    "codes": learn_codes,
    "transfer": transfer,
    "polish": polish,
}


def latest_state(args: argparse.Namespace, teacher: Teacher) -> tuple[Any, Adapter, str]:
    """Tower and adapter of the furthest stage, and what to call that state."""
    tower = build_tower(args.target, args.seed)
    for stage in ("polish", "transfer"):
        if (args.work / f"{stage}.pt").exists():
            steps = _restore(args, stage, tower=tower)
            return tower, _restore_adapter(args, teacher), f"{stage}, {steps} steps"
    raise FileNotFoundError(f"no trained tower in {args.work}: run `d3tree train vision` first")


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Marks "tower" (the latest checkpoint), "target" (a built verifier) or "codes" (labels instead of pixels)."""
    teacher = load_teacher(args.target, args.dtype)
    drawn = evaluation.held_out_scenes(args.limit or 300)
    scores: evaluation.Scores = {}
    tokens: evaluation.Tokens
    if args.evaluate == "codes":
        codes = CodeBook(teacher.lm.embed, teacher.writer.tokenizer)
        what = f"codes, {_restore(args, 'codes', codes=codes)} steps"
        _restore_adapter(args, teacher)

        def from_labels(images: Tensor, labels: Labels | None) -> Tensor:
            wanted: Tensor = codes(labels)
            return wanted

        tokens = from_labels
        easy = evaluation.easy_items_with_labels(args.limit)
    else:
        if args.evaluate == "target":
            verifier, what = Verifier(args.target), str(args.target)
            tower = verifier.model.model.visual
        else:
            tower, adapter, what = latest_state(args, teacher)
            verifier = Verifier(args.target, tower.state_dict(), adapter.state_dict())
        tokens = evaluation.tower_tokens(tower)
        easy = evaluation.easy_items(args.limit)
        scores |= evaluation.score_descriptions(verifier, drawn)
    scores |= evaluation.score_short(teacher, tokens, iter(easy), len(easy))
    scores |= evaluation.score_short(teacher, tokens, evaluation.scene_items(drawn), len(drawn))
    scores["easy-vqa test"] = evaluation.total(scores, ("easy-yesno", "easy-name"))
    print(f"{what}; {len(easy)} easy-VQA test images, {len(drawn)} held-out scenes")
    for name, tally in scores.items():
        print(f"{name:18} {tally}")
    result: dict[str, Any] = {"scores": {name: asdict(tally) for name, tally in scores.items()}}
    result |= _text_marks(args, teacher)
    (args.work / f"evaluation-{args.evaluate}.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def _text_marks(args: argparse.Namespace, teacher: Teacher) -> dict[str, Any]:
    """How far the adapter moved the text, on held-out answers of the original; empty without that data."""
    if args.text is None:
        return {}
    texts = [torch.tensor(c.tokens) for c in load_texts(args.text, held_out=True)][: args.limit or 100]
    marks = perplexity((teacher.lm, None), (teacher.lm, teacher.adapter), texts)
    print(f"perplexity of held-out text: {marks.original:.3f} originally, {marks.adapted:.3f} now ({marks.rise:+.1%})")
    return {"perplexity": {**asdict(marks), "rise": marks.rise}}


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    deadline = time.time() + 60 * args.minutes if args.minutes else None
    if args.evaluate:
        evaluate(args)
    elif args.export:
        tower, adapter, what = latest_state(args, load_teacher(args.target))
        notes = {"command": "d3tree train vision", "seed": args.seed, "state": what}
        data = "easy-vqa 1.0 train split (MIT), rendered scenes (sglang_d3tree.demo.scenes)"
        export(tower, adapter, args.export, {**notes, "data": data})
        print(f"{args.export}: {what}, {args.export.stat().st_size / 1e6:.1f} MB")
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
