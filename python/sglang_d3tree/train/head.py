"""Trains the tree-size head of a drafter: ``d3tree train head`` (METHOD 3; frozen, or joint with the drafter)."""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sglang_d3tree.fingerprint import checkpoint_fingerprint
from sglang_d3tree.head_file import KINDS, HeadFile, head_path, save_head
from sglang_d3tree.train.drafter_checkpoint import load_target_ends
from sglang_d3tree.train.head_collect import CollectOptions, collect_all
from sglang_d3tree.train.head_fit import FitOptions, fit, split_by_conversation
from sglang_d3tree.train.head_report import plot, report
from sglang_d3tree.train.joint import JointOptions, continued, train_joint
from sglang_d3tree.tree.head import HeadWeights

log = logging.getLogger(__name__)

PATH_REJECTED = 0.3
"""Measured on the demo pair: with all nodes alike, the path term learns what is said below rejected parents."""
REPORT_ROWS = 64
"""Rows of the trees that the report prunes."""
COMPARED_ROWS = 16
"""Mean rows a round at which a head has to beat the draft."""


def train_head(
    target_dir: Path,
    drafter_dir: Path,
    data_dirs: Sequence[Path],
    out_dir: Path,
    cache_dir: Path,
    collecting: CollectOptions,
    fitting: FitOptions,
    *,
    progress: bool = True,
) -> tuple[HeadWeights, dict[str, Any]]:
    """Collect, fit, report, and write the head beside the drafter in ``out_dir``.

    Raises:
        FileNotFoundError: no answers or no drafter where they should be.
        ValueError: answers of another target, or another drafter in ``out_dir``.
    """
    if checkpoint_fingerprint(out_dir) != checkpoint_fingerprint(drafter_dir):
        raise ValueError(f"--out {out_dir} holds another drafter than {drafter_dir}; a head is for one drafter only")
    began = time.monotonic()
    data = collect_all(target_dir, drafter_dir, data_dirs, collecting, cache_dir, progress=progress)
    collected = time.monotonic()
    embedding = load_target_ends(target_dir).embedding
    training, validation = split_by_conversation(data, fitting.seed)
    head, curve = fit(training, validation, embedding, fitting)
    found: dict[str, Any] = {
        "kind": head.kind,
        "parameters": head.num_parameters,
        "collect": asdict(collecting),
        "fit": asdict(fitting),
        "training_drafts": len(training),
        "validation_loss": curve,
        "seconds": {"collect": collected - began, "fit": time.monotonic() - collected},
        "validation": report(head, validation, embedding, max(REPORT_ROWS, collecting.nodes + 1)),
    }
    path = save_head(out_dir, target_dir, HeadFile(head, collecting.topk, found))
    path.with_suffix(".json").write_text(json.dumps(found, indent=2) + "\n")
    plot(found["validation"], f"{head.kind} head, {head.num_parameters:,} parameters", path.with_suffix(".png"))
    return head, found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``d3tree train head``."""
    c, f = CollectOptions(), FitOptions()
    cache = Path(".cache/d3tree")
    parser.add_argument("--target", type=Path, default=cache / "target", help="target checkpoint")
    parser.add_argument("--drafter", type=Path, default=cache / "drafter", help="drafter whose states the head reads")
    parser.add_argument(
        "--data", type=Path, nargs="+", default=[cache / "data/text"],
        help="shard directories of `d3tree data generate`, answered by this target",
    )  # fmt: skip
    parser.add_argument(
        "--kind", choices=(*KINDS, "both"), default="both",
        help="linear: 2H + 2 parameters; path: with the path term, grows the tree; both: one after the other",
    )  # fmt: skip
    parser.add_argument("--rank", type=int, default=32, help="of the path term")
    parser.add_argument("--topk", type=int, default=c.topk, help="candidates per depth; served with as many")
    parser.add_argument("--nodes", type=int, default=c.nodes, help="nodes of a verified candidate tree")
    parser.add_argument("--conversations", type=int, default=c.conversations, help="answers to collect from")
    parser.add_argument("--drafts", type=int, default=c.drafts, help="anchors per answer at most")
    parser.add_argument("--trees", type=int, default=c.trees, help="anchors per answer whose trees are verified")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=f.epochs, help="of the fit at most")
    parser.add_argument("--lr", type=float, default=f.lr, help="learning rate of the fit")
    parser.add_argument(
        "--rejected", type=float, default=None,
        help="weight of nodes below parents that the target rejects (linear: 1, all nodes alike; path: 0.3)",
    )  # fmt: skip
    parser.add_argument(
        "--exclusive", action=argparse.BooleanOptionalAction, default=None,
        help="softmax over a parent's candidates and 'none of them' instead of a sigmoid for each (default: for path)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default=c.dtype, help="of the matrix products while collecting"
    )
    parser.add_argument("--cache", type=Path, default=cache / "head", help="collected data, reused by later runs")
    parser.add_argument(
        "--out", type=Path, default=None, help="directory of the same drafter that gets the head (default: --drafter)"
    )
    joint = parser.add_argument_group("joint mode", "trains drafter and head further together, from the frozen result")
    j = JointOptions()
    joint.add_argument("--joint", action="store_true", help="needs a trained head and another --out")
    joint.add_argument("--minutes", type=float, default=20.0, help="training time (with --steps 0)")
    joint.add_argument("--steps", type=int, default=0, help="training steps (0: by time)")
    joint.add_argument("--lambda", dest="scale", type=float, default=j.scale, help="weight of the head's loss")
    joint.add_argument("--boost", type=float, default=j.boost, help="extra weight of a reference path that is kept")
    joint.add_argument("--threshold", type=float, default=j.threshold, help="survival above which a path is kept")
    joint.add_argument("--run-dir", type=Path, default=cache / "joint", help="state and curve")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's own choice)")


def run(args: argparse.Namespace) -> int:
    """Train the kinds that were asked for."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.joint:
        return run_joint(args)
    collecting = CollectOptions(
        seed=args.seed,
        conversations=args.conversations,
        drafts=args.drafts,
        trees=args.trees,
        nodes=args.nodes,
        topk=args.topk,
        dtype=args.dtype,
    )
    for kind in KINDS if args.kind == "both" else (args.kind,):
        fitting = FitOptions(
            seed=args.seed,
            rank=args.rank if kind == "path" else 0,
            exclusive=kind == "path" if args.exclusive is None else args.exclusive,
            rejected=(PATH_REJECTED if kind == "path" else 1.0) if args.rejected is None else args.rejected,
            epochs=args.epochs,
            lr=args.lr,
        )
        out = args.out or args.drafter
        head, found = train_head(args.target, args.drafter, args.data, out, args.cache, collecting, fitting)
        nodes = found["validation"].get("tree_nodes", found["validation"]["all_candidates"])
        log.info(
            "%s head, %d parameters: AUC %.3f (draft %.3f), ECE %.3f (draft %.3f); %s",
            kind, head.num_parameters, nodes["auc"], nodes["auc_of_draft"], nodes["ece"], nodes["ece_of_draft"],
            head_path(out, kind),
        )  # fmt: skip
        lengths = found["validation"]["accept_length_at_rows"]
        with_head, without = (lengths[f"d3tree by the {name}"][COMPARED_ROWS] for name in ("head", "draft"))
        if with_head < without:
            log.warning(
                "at %d rows a round this head accepts %.2f tokens, the draft's own probabilities %.2f: serve with "
                "--speculative-d3tree-head none, or train it on more answers",
                COMPARED_ROWS, with_head, without,
            )  # fmt: skip
    return 0


def run_joint(args: argparse.Namespace) -> int:
    """``--joint``, for one kind of head."""
    kind = "path" if args.kind == "both" else args.kind
    if args.out is None:
        raise ValueError("--joint writes a new drafter: say where with --out")
    options = continued(args.drafter, seed=args.seed, steps=args.steps, minutes=args.minutes, dtype=args.dtype)
    joint = JointOptions(args.boost, args.threshold, args.scale)
    found = train_joint(args.target, args.drafter, args.data, args.out, args.run_dir, kind, options, joint)
    log.info("accept length at mean rows, frozen %s, joint %s", found["frozen"], found["joint"])
    return 0


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(_parser)
    raise SystemExit(run(_parser.parse_args()))
