"""A reduced draft vocabulary: the tokens that the target's own answers use most (METHOD 5b)."""

from __future__ import annotations

import argparse
import itertools
import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open

from sglang_d3tree.runtime.token_map import FILE_NAME
from sglang_d3tree.train.shards import shard_paths

log = logging.getLogger(__name__)


def answer_counts(shards: Iterable[Path], *, held_out: bool) -> Counter[int]:
    """How often every token occurs in the answers of training or held-out conversations; hidden states stay on disk."""
    counts: Counter[int] = Counter()
    for path in shards:
        with safe_open(path, framework="pt") as shard:
            tokens, offsets = shard.get_tensor("tokens"), shard.get_tensor("offsets").tolist()
            prompts, chosen = shard.get_tensor("prompt_lengths").tolist(), shard.get_tensor("held_out").tolist()
        for i, (first, end) in enumerate(itertools.pairwise(offsets)):
            if chosen[i] == held_out:
                counts.update(tokens[first + prompts[i] : end].tolist())
    return counts


def hot_tokens(counts: Counter[int], size: int) -> list[int]:
    """The `size` most frequent tokens, ascending; equal counts by smaller id.

    Where the answers use fewer, the smallest other ids fill up: byte-pair vocabularies are numbered by the order of
    their merges, the frequent ones first.

    Raises:
        ValueError: for a size below 1, or no tokens at all.
    """
    if size < 1 or not counts:
        raise ValueError(f"no token map of {size} tokens from {len(counts)} different tokens")
    chosen = set(sorted(counts, key=lambda token: (-counts[token], token))[:size])
    unused = (token for token in itertools.count() if token not in chosen)
    return sorted(chosen | set(itertools.islice(unused, size - len(chosen))))


def coverage(counts: Counter[int], tokens: Iterable[int]) -> float:
    """Share of all occurrences in `counts` that `tokens` cover; 1 for no occurrences."""
    total = sum(counts.values())
    return sum(counts[token] for token in tokens) / total if total else 1.0


def build_token_map(data_dir: Path, size: int, out: Path) -> list[int]:
    """Write the map as SGLang's ``--speculative-token-map`` reads it.

    Raises:
        ValueError: for a directory without data, or a size that cannot be.
    """
    shards = shard_paths(data_dir)
    if not shards:
        raise ValueError(f"{data_dir} holds no training data; make some with 'd3tree data generate'.")
    tokens = hot_tokens(answer_counts(shards, held_out=False), size)
    torch.save(tokens, out)
    held_out = answer_counts(shards, held_out=True)
    log.info(
        "%s: %d tokens, %.2f %% of the %d tokens in held-out answers",
        out, len(tokens), 100 * coverage(held_out, tokens), sum(held_out.values()),
    )  # fmt: skip
    return tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``d3tree build-token-map``."""
    parser.add_argument("--data", type=Path, required=True, help="directory of d3tree data generate")
    parser.add_argument("--size", type=int, default=8192, help="tokens in the map")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--draft", type=Path, help="checkpoint directory of the drafter: the map goes beside it")
    where.add_argument("--out", type=Path, help="file to write instead")


def run(args: argparse.Namespace) -> int:
    """Build the map."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    build_token_map(args.data, args.size, args.out or args.draft / FILE_NAME)
    return 0
