"""Accept length of every policy at equal mean verified rows per round, on held-out requests of the four kinds.

    python benchmark/bench_accept.py --drafter DRAFTER_DIR --count 24

The target answers the requests in process; the answers are then replayed round by round (train/replay.py), which gives
the accept length of serving without a server: a round accepts the nodes that continue the answer, at temperature 0 and
above. ``--check N`` asks a real server for N answers of each kind and compares its rounds with the replayed ones.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accept_report
import torch
from accept_report import AcceptLength, accept_length
from tqdm import tqdm

from sglang_d3tree.demo import workloads
from sglang_d3tree.demo.evaluate import ask
from sglang_d3tree.demo.pair import DemoPair
from sglang_d3tree.demo.server import Server
from sglang_d3tree.demo.tour import d3tree_arguments
from sglang_d3tree.head_file import KINDS as HEAD_KINDS
from sglang_d3tree.head_file import load_head
from sglang_d3tree.train.drafting import Models, draft_answer, load_models
from sglang_d3tree.train.replay import (
    Drafts,
    EdgesOf,
    Grown,
    Replayed,
    grow,
    head_or_draft,
    kept_rows,
    match_rows,
    replay,
    total,
)
from sglang_d3tree.train.workload_answers import record_answers
from sglang_d3tree.tree.head import prepare_head

log = logging.getLogger(__name__)
ALL = "all kinds"
DRAFT_TOPK = 16
"""Candidates per depth of methods without a head; heads bring their own number."""


@dataclass(frozen=True)
class Method:
    """A line of the table: which policy, whose survival, how many candidates per depth."""

    name: str
    policy: str
    edges_of: EdgesOf
    topk: int


def methods(models: Models, target_dir: Path, drafter_dir: Path) -> list[Method]:
    """The baselines, d3tree with the draft's own survival, and d3tree with every head there is."""
    draft = head_or_draft(None)
    found = [Method(name, name, draft, DRAFT_TOPK) for name in ("chain", "ddtree", "caddtree")]
    found.append(Method("d3tree, no head", "d3tree", draft, DRAFT_TOPK))
    for kind in HEAD_KINDS:
        try:
            file = load_head(drafter_dir, target_dir, kind)
        except ValueError as error:
            log.warning("%s", error)
            continue
        assert file is not None
        tables = prepare_head(file.weights, [models.ends.embedding])
        found.append(Method(f"d3tree, {kind} head", "d3tree", head_or_draft(tables), file.topk))
    return found


def measure(
    answers: dict[str, list[Drafts]], every: Sequence[Method], rows: Sequence[int], tree_rows: int
) -> list[AcceptLength]:
    """All methods on all kinds and on all kinds together; of d3tree and caddtree the trees have ``tree_rows`` rows."""
    results: dict[tuple[str, int, str], AcceptLength] = {}
    for method in tqdm(every, desc="replaying", mininterval=2):
        grown: dict[str, list[Grown]] = {
            kind: [grow(_narrow(d, method.topk), method.policy, method.edges_of, tree_rows) for d in drafts]
            for kind, drafts in answers.items()
        }
        grown[ALL] = [g for kind in answers for g in grown[kind]]
        for kind, own in grown.items():
            for count in rows:
                limit, replays = match_rows(own, method.policy, count)
                results[kind, count, method.name] = accept_length(kind, method.name, count, limit, replays)
    order = [(k, r, m.name) for k in (*answers, ALL) for m in every for r in rows]
    return [results[key] for key in order]


def _narrow(drafts: Drafts, topk: int) -> Drafts:
    """The same drafts with fewer candidates per depth."""
    c = drafts.candidates
    candidates = type(c)(c.token_ids[..., :topk], c.log_probs[..., :topk], c.horizons)
    return Drafts(drafts.anchors, drafts.states, candidates, drafts.continuation)


def served_rounds(
    args: argparse.Namespace,
    asked: dict[str, list[workloads.Request]],
    answers: dict[str, list[Drafts]],
    every: Sequence[Method],
) -> list[dict[str, Any]]:
    """The same requests at a server and replayed: d3tree with the best head, and ddtree, at 16 rows a round.

    In float32, where server and replay have no reason to differ but the order of sums.
    """
    rows, best = 16, every[-1]
    arguments = [
        *d3tree_arguments(DemoPair(args.target, args.drafter)), "--dtype", "float32",
        "--speculative-d3tree-cost-profile", "none", "--speculative-d3tree-max-rows", str(rows),
        "--speculative-d3tree-topk", str(best.topk),
    ]  # fmt: skip
    found = []
    with Server(arguments, name="d3tree server") as server:
        import requests

        for method, policy in ((best, "d3tree"), (every[1], "ddtree")):
            requests.post(f"{server.url}/d3tree/options", json={"policy": policy}, timeout=60).raise_for_status()
            for kind, drafts in answers.items():
                served = [ask(server.url, request) for request in asked[kind][: args.check]]
                ours: list[Replayed] = []
                for d in drafts[: args.check]:
                    grown = grow(_narrow(d, best.topk), method.policy, method.edges_of, rows)
                    ours.append(replay(grown, kept_rows(grown, "ddtree", rows)))
                whole = total(ours)
                found.append(
                    {
                        "kind": kind, "policy": method.name, "rows": rows, "answers": len(served),
                        "served": sum(s.tokens for s in served) / max(1, sum(s.rounds for s in served)),
                        "replayed": whole.tokens / max(1, whole.rounds),
                        "same_rounds": sum(
                            (s.tokens, s.rounds) == (o.tokens, o.rounds) for s, o in zip(served, ours, strict=True)
                        ),
                    }
                )  # fmt: skip
    return found


def write(args: argparse.Namespace, runs: dict[str, list[AcceptLength]], checks: list[dict[str, Any]]) -> None:
    """Markdown, JSON and a plot of the first temperature."""
    lines = [
        "# Accept length at equal verified rows",
        "",
        f"Written by `make bench-accept` on {time.strftime('%Y-%m-%d', time.gmtime())}. Tokens per round (bonus",
        "included) of recorded answers replayed round by round; mean [95 % bootstrap interval over answers]. Every",
        "column spends the same mean number of verified rows per round, anchors included: ddtree takes that many in",
        "each round, caddtree and d3tree distribute them over rounds by one limit per kind (d3tree: a survival",
        f"threshold) within trees of {args.tree_rows} rows. A chain has no more than the block's rows. Requests are",
        "held out (`demo/workloads.py`); `d3tree, no head` prunes by the draft's own path probability.",
    ]
    for name, results in runs.items():
        lines += ["", f"## Temperature {name}", accept_report.table(results)]
    if checks:
        lines += [
            "", "## Checked against a server", "",
            "The same requests at a running server (float32, no cost profile, 16 rows a round):", "",
            "| kind | policy | served | replayed | answers with the same rounds |", "|---|---|---|---|---|",
        ]  # fmt: skip
        for c in checks:
            same = f"{c['same_rounds']} of {c['answers']}"
            lines.append(f"| {c['kind']} | {c['policy']} | {c['served']:.3f} | {c['replayed']:.3f} | {same} |")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("\n".join(lines) + "\n")
    numbers = {
        "count": args.count, "tree_rows": args.tree_rows, "dtype": args.dtype,
        "temperatures": {name: accept_report.as_json(results) for name, results in runs.items()},
        "server": checks,
    }  # fmt: skip
    args.out.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")
    accept_report.plot(next(iter(runs.values())), args.out.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(".cache/d3tree")
    parser.add_argument("--target", type=Path, default=cache / "target")
    parser.add_argument("--drafter", type=Path, default=cache / "drafter", help="with its trained heads beside it")
    parser.add_argument("--count", type=int, default=24, help="requests per kind")
    parser.add_argument("--kinds", nargs="+", choices=list(workloads.KINDS), default=list(workloads.KINDS))
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32, 64], help="mean verified rows per round")
    parser.add_argument("--tree-rows", type=int, default=128, help="of a candidate tree at most")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the matrix products")
    parser.add_argument("--check", type=int, default=0, help="requests per kind that a real server answers, too")
    parser.add_argument("--out", type=Path, default=Path("docs/results/accept-length.md"))
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    dtype = "float32" if args.check else args.dtype
    models = load_models(args.target, args.drafter, getattr(torch, dtype))
    every = methods(models, args.target, args.drafter)
    widest = max(m.topk for m in every)
    runs, checks = {}, []
    for temperature in args.temperatures:
        asked: dict[str, list[workloads.Request]] = {}
        answers: dict[str, list[Drafts]] = {}
        for kind in args.kinds:
            requests = workloads.requests_of(kind, args.count)
            recorded = record_answers(models.tower, args.target, requests, temperature)
            # An answer of one token is the prefill's: no round is ever drafted for it.
            drafted = [(r, c) for r, c in zip(requests, recorded, strict=True) if len(c.tokens) > c.prompt_length + 1]
            asked[kind] = [r for r, _ in drafted]
            answers[kind] = [draft_answer(models, c, widest) for _, c in drafted]
            log.info("temperature %g: %d answers of kind %s", temperature, len(answers[kind]), kind)
        runs[f"{temperature:g}"] = measure(answers, every, args.rows, args.tree_rows)
        if args.check and temperature == 0:
            checks = served_rounds(args, asked, answers, every)
        write(args, runs, checks)
    print(args.out.read_text())


if __name__ == "__main__":
    main()
