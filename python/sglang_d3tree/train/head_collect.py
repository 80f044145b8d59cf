"""Collects what a head learns from: drafts at random anchors of the target's own answers, trees, verdicts.

Every tree is verified whole by one ancestor-masked pass (METHOD 3, labels). Because the target's answer after a row
labels *all* candidates below it, not only those that the tree holds, a head that orders children otherwise than the
draft finds its nodes labelled as well. The recorded answer labels the candidates below its own path for nothing, so
drafts without a tree are collected too: they cost a tenth.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

from sglang_d3tree.fingerprint import checkpoint_fingerprint
from sglang_d3tree.train.answers import Conversation, ImagePrompt, load_image_model, prepare_image
from sglang_d3tree.train.data import target_fingerprint
from sglang_d3tree.train.drafter_blocks import anchor_range
from sglang_d3tree.train.drafting import Models, draft, load_models
from sglang_d3tree.train.head_data import HeadData, concatenate, load_data, save_data
from sglang_d3tree.train.image_prompts import image_questions
from sglang_d3tree.train.prompts import KINDS
from sglang_d3tree.train.shards import load_shard, read_options, shard_paths
from sglang_d3tree.train.tree_verify import prefill, verify_trees
from sglang_d3tree.tree.build import CandidateTree, build_tree

log = logging.getLogger(__name__)

_PER_FILE = 16
"""Conversations per file: what an interruption may cost."""


@dataclass(frozen=True)
class CollectOptions:
    """Everything the collected data depends on besides target, drafter and answers.

    conversations: how many, evenly over the data directories. drafts, trees: per conversation at most. nodes: of a
    tree, anchor excluded. topk: candidates per depth. dtype: of the matrix products.
    """

    seed: int = 0
    conversations: int = 280
    drafts: int = 128
    trees: int = 4
    nodes: int = 31
    topk: int = 16
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Source:
    """A conversation and where it lies."""

    data_dir: Path
    shard: int
    index: int
    conversation: Conversation


def held_in(data_dirs: Sequence[Path], count: int, seed: int) -> list[Source]:
    """``count`` random conversations that are not held out, evenly over the directories, in random order.

    Raises:
        FileNotFoundError: a directory without complete shards.
    """
    rng = torch.Generator().manual_seed(seed)
    chosen: list[Source] = []
    for place, data_dir in enumerate(data_dirs):
        paths = shard_paths(data_dir)
        if not paths:
            raise FileNotFoundError(f"--data {data_dir}: no shards; 'd3tree data generate' makes them")
        usable = [
            Source(data_dir, int(path.stem.removeprefix("shard-")), i, c)
            for path in paths
            for i, c in enumerate(load_shard(path))
            if not c.held_out and len(anchor_range(c))
        ]
        share = count // len(data_dirs) + (place < count % len(data_dirs))
        chosen += [usable[i] for i in torch.randperm(len(usable), generator=rng)[:share].tolist()]
    return [chosen[i] for i in torch.randperm(len(chosen), generator=rng).tolist()]


class Images:
    """The image terms of recorded prompts; shards hold none, but their pictures follow from seed and shard."""

    def __init__(self, target_dir: Path) -> None:
        self._target_dir = target_dir
        self._models: tuple[object, object] | None = None
        self._questions: dict[tuple[Path, int], list] = {}  # type: ignore[type-arg]

    def __call__(self, source: Source) -> ImagePrompt | None:
        """The conversation's image, or None for a text.

        Raises:
            ValueError: the pictures that are drawn now are not those that the conversation was recorded with.
        """
        conversation = source.conversation
        if not conversation.kind.startswith("image"):
            return None
        key = source.data_dir, source.shard
        if key not in self._questions:
            options = read_options(source.data_dir)
            self._questions[key] = image_questions(options.per_shard, options.seed * 1_000_003 + source.shard)
        question = self._questions[key][source.index]
        model, processor = self._load()
        ids, image = prepare_image(model, processor, question.image, question.prompt.text)
        if ids != conversation.tokens[: conversation.prompt_length]:
            raise ValueError(f"{source.data_dir}: its image prompts are not the ones of this version; generate it anew")
        return image

    def _load(self) -> tuple[object, object]:
        if self._models is None:
            from transformers import AutoProcessor

            model = load_image_model(self._target_dir)
            self._models = model, AutoProcessor.from_pretrained(self._target_dir)
        return self._models


@torch.inference_mode()
def collect(
    models: Models,
    conversation: Conversation,
    image: ImagePrompt | None,
    options: CollectOptions,
    number: int,
    rng: torch.Generator,
) -> HeadData:
    """Drafts at random anchors of one conversation; the first ``options.trees`` of them with their verified trees."""
    span, horizon = anchor_range(conversation), models.drafter.config.block_size - 1
    anchors = span.start + torch.randperm(len(span), generator=rng)[: options.drafts]
    states, candidates = draft(models, conversation, anchors, options.topk)
    tokens = torch.tensor(conversation.tokens)
    tree = build_tree(candidates, tokens[anchors], options.nodes + 1)
    count = min(options.trees, len(anchors))
    verified = torch.arange(len(anchors)) < count
    targets = torch.zeros_like(tree.token_ids)
    if count:
        cache = prefill(models.tower, tokens, image)
        offset = image.offset if image else 0
        last = verify_trees(models.tower, cache, _first(tree, count), anchors[:count], offset)
        targets[:count] = models.tower.logits(last).argmax(dim=-1)
    # The last token was never fed back: nothing is known after it.
    says = models.tower.logits(conversation.final[:-1].float()).argmax(dim=-1)
    places = anchors[:, None] + torch.arange(horizon)
    inside = places < len(tokens) - 1
    places = places.clamp(max=len(tokens) - 2)
    return HeadData(
        states=states.bfloat16(),
        token_ids=candidates.token_ids.int(),
        log_probs=candidates.log_probs,
        conversation=torch.full((len(anchors),), number, dtype=torch.int32),
        kind=torch.full((len(anchors),), KINDS.index(conversation.kind), dtype=torch.int32),
        tree_tokens=tree.token_ids.int(),
        tree_parents=tree.parents.int(),
        tree_depths=tree.depths.int(),
        tree_ranks=tree.ranks.int(),
        tree_valid=tree.valid & verified[:, None],
        tree_targets=targets.int(),
        path_tokens=tokens[places].int(),
        path_targets=says[places].int(),
        path_valid=inside,
    )


def _first(tree: CandidateTree, count: int) -> CandidateTree:
    """The trees of the first requests."""
    parts = {f.name: getattr(tree, f.name)[:count] for f in fields(tree) if f.name != "horizon"}
    return replace(tree, **parts)


def check_answers(target_dir: Path, data_dirs: Sequence[Path]) -> None:
    """Refuse answers of another target: its verdicts would not fit them.

    Raises:
        ValueError: naming the directory.
    """
    known: set[str] = set()
    for data_dir in data_dirs:
        recorded = read_options(data_dir).target
        if recorded in known:
            continue
        known |= {target_fingerprint(target_dir, vision) for vision in (False, True)}
        if recorded not in known:
            raise ValueError(f"--data {data_dir} was answered by another target; generate it anew with this one")


def collect_all(
    target_dir: Path,
    drafter_dir: Path,
    data_dirs: Sequence[Path],
    options: CollectOptions,
    cache_dir: Path,
    *,
    progress: bool = True,
) -> HeadData:
    """All collected data, from ``cache_dir`` as far as it is there; an interrupted run goes on where it stopped.

    Files depend on target, drafter, answers and options alone; what was collected with others lies in other folders.
    """
    from tqdm import tqdm

    check_answers(target_dir, data_dirs)
    record = {
        "target": target_fingerprint(target_dir),
        "drafter": checkpoint_fingerprint(drafter_dir),
        "data": [[asdict(read_options(d)), [p.stat().st_size for p in shard_paths(d)]] for d in data_dirs],
        "options": asdict(options),
    }
    key = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:12]
    folder = cache_dir / key
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "collected.json").write_text(json.dumps(record, indent=2) + "\n")
    sources = held_in(data_dirs, options.conversations, options.seed)
    files = [folder / f"drafts-{i // _PER_FILE:04d}.safetensors" for i in range(0, len(sources), _PER_FILE)]
    missing = [i for i, path in enumerate(files) if not path.exists()]
    if missing:
        models, images = load_models(target_dir, drafter_dir, getattr(torch, options.dtype)), Images(target_dir)
        total = sum(len(sources[i * _PER_FILE : (i + 1) * _PER_FILE]) for i in missing)
        with tqdm(total=total, desc="collecting", unit="conversation", disable=not progress, mininterval=2) as bar:
            for i in missing:
                parts = []
                for number in range(i * _PER_FILE, min((i + 1) * _PER_FILE, len(sources))):
                    source = sources[number]
                    rng = torch.Generator().manual_seed(options.seed * 1_000_003 + number)
                    parts.append(collect(models, source.conversation, images(source), options, number, rng))
                    bar.update()
                save_data(files[i], concatenate(parts))
    data = concatenate([load_data(path) for path in files])
    log.info("%d drafts, %d of them with a verified tree, in %s", len(data), int(data.tree_valid[:, 0].sum()), folder)
    return data
