"""``make demo-eval``: what the demo pair reaches, on pictures and prompts that no training saw.

Accuracies are marked in process (greedy, see ``train.vision_evaluate``); accept lengths come from a real server with
D3TREE that verifies its default of 32 rows per request in every round, whatever they cost here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import requests
import torch
from tqdm import tqdm

from sglang_d3tree.demo import workloads
from sglang_d3tree.demo.pair import DemoPair, prepare_pair
from sglang_d3tree.demo.server import Server
from sglang_d3tree.demo.tour import d3tree_arguments

BOOTSTRAP, CONCURRENCY = 2000, 4
POLICIES = ("d3tree", "chain")
MARKS_DTYPE = "bfloat16"
"""Of the language tower's matrices while short answers are marked: what servers use by default, and half the time."""


@dataclass(frozen=True)
class Rounds:
    """Tokens that verify rounds emitted and how many rounds they took, of one answer."""

    tokens: int
    rounds: int


@dataclass(frozen=True)
class AcceptLength:
    """Tokens per round over all answers of a kind, with a 95 % bootstrap interval over the answers."""

    kind: str
    policy: str
    answers: int
    rounds: int
    mean: float
    low: float
    high: float


def accept_length(kind: str, policy: str, answers: Sequence[Rounds], seed: int = 0) -> AcceptLength:
    """The mean and interval of ``tokens_per_round`` as a line of the report."""
    interval = tokens_per_round([(a.tokens, a.rounds) for a in answers], BOOTSTRAP, seed)
    return AcceptLength(kind, policy, len(answers), sum(a.rounds for a in answers), *interval)


def tokens_per_round(answers: Sequence[tuple[int, int]], resamples: int, seed: int = 0) -> tuple[float, float, float]:
    """Mean, low and high of a 95 % bootstrap interval over answers of (tokens, rounds).

    Ratio of sums: long answers count by their rounds, as they do for whoever waits for them.
    """
    rng = random.Random(seed)

    def ratio(sample: Sequence[tuple[int, int]]) -> float:
        return sum(tokens for tokens, _ in sample) / max(1, sum(rounds for _, rounds in sample))

    means = sorted(ratio(rng.choices(answers, k=len(answers))) for _ in range(resamples))
    return ratio(answers), means[int(0.025 * resamples)], means[int(0.975 * resamples)]


def ask(url: str, request: workloads.Request, **options: Any) -> Rounds:
    """One answer; the first token comes from the prefill, not from a round."""
    body = request.body(return_meta_info=True, **options)
    response = requests.post(f"{url}/v1/chat/completions", json=body, timeout=600)
    response.raise_for_status()
    choice = response.json()["choices"][0]
    meta = choice["meta_info"]
    return Rounds(meta["completion_tokens"] - 1, meta["spec_verify_ct"])


def measure_accept_lengths(url: str, count: int, kinds: Sequence[str]) -> list[AcceptLength]:
    """Every policy on every kind, on one running server."""
    results = []
    requests_by_kind = {kind: workloads.requests_of(kind, count) for kind in kinds}
    for policy in POLICIES:
        requests.post(f"{url}/d3tree/options", json={"policy": policy}, timeout=60).raise_for_status()
        for kind, asked in requests_by_kind.items():
            with ThreadPoolExecutor(CONCURRENCY) as pool:
                answers = pool.map(lambda request: ask(url, request), asked)
                rounds = list(tqdm(answers, total=len(asked), desc=f"{policy}, {kind}", mininterval=5))
            results.append(accept_length(kind, policy, [a for a in rounds if a.rounds]))
    return results


def mark_answers(pair: DemoPair, limit: int | None, work: Path) -> dict[str, Any]:
    """Right answers on easy-VQA's test split and on held-out scenes, by the training's own marks."""
    from sglang_d3tree.train import vision

    work.mkdir(parents=True, exist_ok=True)
    parser = argparse.ArgumentParser()
    vision.add_arguments(parser)
    arguments = ["--target", str(pair.model_path), "--work", str(work), "--evaluate", "target"]
    arguments += ["--dtype", MARKS_DTYPE, "--threads", str(os.cpu_count() or 1)]
    arguments += ["--limit", str(limit)] if limit else []
    scores: dict[str, Any] = vision.evaluate(parser.parse_args(arguments))["scores"]
    return scores


def mark_text(pair: DemoPair, count: int, work: Path) -> dict[str, Any]:
    """What teaching the language tower about images did to its text: perplexity of answers that the original tower
    sampled to ``count`` held-out prompts, by the original and by the demo's."""
    from transformers import AutoTokenizer

    from sglang_d3tree.demo.target import build_target
    from sglang_d3tree.train.answers import answer
    from sglang_d3tree.train.data import Draws, make_jobs
    from sglang_d3tree.train.prompts import build_prompts
    from sglang_d3tree.train.shards import DataOptions
    from sglang_d3tree.train.tower import LanguageTower
    from sglang_d3tree.train.vision_language import load_language
    from sglang_d3tree.train.vision_rehearsal import perplexity

    original = build_target(work / "untrained", untrained=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(original)
    prompts = [p for p in build_prompts(40 * count, seed=1) if p.held_out][:count]
    jobs = make_jobs(prompts, tokenizer, Draws(DataOptions(seed=1, sampled_share=1.0), shard=0))
    answers = answer(LanguageTower(original), jobs, stop_ids=[0, int(tokenizer.eos_token_id)])
    texts = [torch.tensor(c.tokens) for c in answers]
    marks = perplexity((load_language(original), None), (load_language(pair.model_path), None), texts)
    return {**asdict(marks), "rise": marks.rise}


def mark(pair: DemoPair, limit: int | None, work: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Marks of answers and of text. Kept in ``work`` for this verifier: another drafter changes none of them."""
    from sglang_d3tree.train.data import target_fingerprint

    kept = work / f"marks-{target_fingerprint(pair.model_path, vision=True)}-{limit or 'all'}.json"
    if not kept.exists():
        marks = {"scores": mark_answers(pair, limit, work), "text": mark_text(pair, limit or 100, work)}
        kept.write_text(json.dumps(marks) + "\n")
    marks = json.loads(kept.read_text())
    return marks["scores"], marks["text"]


def report(scores: dict[str, Any], text: dict[str, Any], lengths: Sequence[AcceptLength], command: str) -> str:
    """Markdown of all numbers."""
    machine = f"{platform.system()}, {platform.machine()}"
    lines = ["# The demo pair, measured", "", f"Written by `{command}` on {machine}.", ""]
    if scores:
        lines += [
            "## Right answers",
            "",
            "Greedy. A short answer is right when every word is; a description has marks for its shapes, its",
            "colours, its count, each colour with its own shape (pairs), all of these, and being exact word by word.",
            "",
            "| what | right | of | share |",
            "|---|---|---|---|",
        ]
        for name, tally in sorted(scores.items()):
            right, total = tally["right"], tally["total"]
            lines.append(f"| {name} | {right} | {total} | {100 * right / max(1, total):.1f} % |")
        lines += [
            "",
            f"Text: perplexity {text['adapted']:.3f} on {text['tokens']} held-out tokens that the original language",
            f"tower sampled, {text['original']:.3f} by the original itself ({text['rise']:+.1%}).",
            "",
        ]
    if lengths:
        lines += [
            "## Accept length",
            "",
            "Tokens per round, bonus included; temperature 0, at most 32 rows per request; 95 % bootstrap intervals.",
            "",
            "| kind | policy | answers | rounds | accept length | interval |",
            "|---|---|---|---|---|---|",
        ]
        for a in lengths:
            row = f"| {a.kind} | {a.policy} | {a.answers} | {a.rounds} | {a.mean:.2f} | {a.low:.2f} to {a.high:.2f} |"
            lines.append(row)
        lines.append("")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=60, help="requests per kind")
    parser.add_argument("--kinds", nargs="+", choices=list(workloads.KINDS), default=list(workloads.KINDS))
    parser.add_argument("--limit", type=int, default=None, help="mark this many images of each sort (all, 300 scenes)")
    parser.add_argument("--skip", choices=("accuracy", "accept-length"), default=None)
    parser.add_argument("--draft-model-path", type=Path, default=None, help="another drafter than the shipped one")
    parser.add_argument("--work", type=Path, default=Path(".cache/d3tree/demo-eval"), help="scratch folder")
    parser.add_argument("--out", type=Path, default=Path("docs/results/demo-pair.md"))


def run(args: argparse.Namespace) -> int:
    pair = prepare_pair()
    if args.draft_model_path is not None:
        pair = DemoPair(pair.model_path, args.draft_model_path)
    scores: dict[str, Any] = {}
    text_marks: dict[str, Any] = {}
    if args.skip != "accuracy":
        scores, text_marks = mark(pair, args.limit, args.work)
    lengths: list[AcceptLength] = []
    if args.skip != "accept-length":
        arguments = [*d3tree_arguments(pair), "--speculative-d3tree-cost-profile", "none"]
        with Server(arguments, name="d3tree server") as server:
            lengths = measure_accept_lengths(server.url, args.count, args.kinds)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    text = report(scores, text_marks, lengths, "make demo-eval")
    args.out.write_text(text)
    numbers = {"scores": scores, "text": text_marks, "accept_lengths": [asdict(a) for a in lengths]}
    args.out.with_suffix(".json").write_text(json.dumps(numbers, indent=2) + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(_parser)
    raise SystemExit(run(_parser.parse_args()))
