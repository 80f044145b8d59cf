"""Measure what a round costs, through the code that serves, on batches that nobody asked for.

This runs at the end of a server's start, when pools and backends exist and every KV slot is still free: the batches
borrow rows of the slot table, write into free slots and give the rows back. Nothing of a request can be touched, and
no clock is read while requests are served.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2

from sgl_kernel_ext.cpu import sources_digest
from sglang_d3tree.machine import processor_name
from sglang_d3tree.paths import cache_directory
from sglang_d3tree.policy.cost import (
    FILE_VARIABLE,
    SECONDS_VARIABLE,
    TILES,
    CostProfile,
    Curve,
    ProfileKey,
    find_tile,
    measured_curve,
)
from sglang_d3tree.policy.planner import Planner
from sglang_d3tree.runtime.window import open_window
from sglang_d3tree.tree.build import build_tree
from sglang_d3tree.tree.candidates import Candidates
from sglang_d3tree.tree.layout import VerifyRows, layout_rows

if TYPE_CHECKING:
    from sglang_d3tree.runtime.worker import D3TreeWorker

logger = logging.getLogger(__name__)

_AUTO_SECONDS = 8.0
# Largest pass that is measured; the curve's last line is prolonged beyond it.
_MOST_ROWS = 512
_SHORT_PREFIX, _LONG_PREFIX = 16, 512


def cost_profile(worker: D3TreeWorker) -> CostProfile | None:
    """The profile that the server's options ask for, measured now if there is none yet.

    Raises:
        ValueError: naming the flag, for a file that is no profile or belongs to something else.
    """
    setting = worker.options.cost_profile
    if setting == "none":
        return None
    key = profile_key(worker)
    ordered = os.environ.get(FILE_VARIABLE)
    if ordered:
        profile = measure(worker, key, float(os.environ.get(SECONDS_VARIABLE, _AUTO_SECONDS)))
        profile.save(Path(ordered))
        return profile
    if setting != "auto":
        profile = CostProfile.load(Path(setting))
        profile.check(key, setting)
        return profile
    path = _cache_path(key)
    kept: CostProfile | None = _first_rank_says(_cached(path, key))
    if kept is not None:
        return kept
    began = time.perf_counter()
    profile = measure(worker, key, _AUTO_SECONDS)
    if get_parallel().tp_rank == 0:
        profile.save(path)
    logger.info("D3TREE: costs measured in %.1f s and kept in %s", time.perf_counter() - began, path)
    return profile


def _cached(path: Path, key: ProfileKey) -> CostProfile | None:
    try:
        profile = CostProfile.load(path)
        profile.check(key, str(path))
    except ValueError:
        return None
    return profile


def _first_rank_says(value: Any) -> Any:
    """The first tensor-parallel rank's value on every rank: ranks whose clocks differ must still decide alike."""
    return get_parallel().tp_group.broadcast_object(value)


def profile_key(worker: D3TreeWorker) -> ProfileKey:
    """What this server's costs depend on. Weights do not matter, their shapes do."""
    proposed = f"{worker.options.topk} of {worker.draft_vocabulary} tokens, survival {worker.survival_kind}"
    draft_shape = f"block {worker.block_size}, {proposed}"
    return ProfileKey(
        target=f"{type(worker.model_runner.model).__name__} {_shapes(worker.model_runner.model)}",
        drafter=f"{type(worker.draft_model).__name__} {_shapes(worker.draft_model)}, {draft_shape}",
        dtype=str(worker.model_runner.dtype).removeprefix("torch."),
        device=_device_name(worker.device),
        threads=torch.get_num_threads(),
        versions=(
            f"torch {torch.__version__}, sglang {version('sglang')}, sglang-d3tree {version('sglang-d3tree')}, "
            f"kernels {sources_digest()}"
        ),
    )


def _shapes(model: torch.nn.Module) -> str:
    listing = "\n".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in sorted(model.named_parameters()))
    return hashlib.sha256(listing.encode()).hexdigest()[:12]


def _device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return str(torch.cuda.get_device_name())
    return processor_name()


def _cache_path(key: ProfileKey) -> Path:
    return cache_directory() / "costs" / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.json"


class _AlwaysHorizon(Planner):
    """A planner that drafts what it is told, so that a round of a known kind can be timed."""

    drafts = 0

    def horizon(self, requests: int, context: int) -> int:
        return self.drafts


def measure(worker: D3TreeWorker, key: ProfileKey, seconds: float) -> CostProfile:
    """Time the parts of a round; further sweeps follow the first while `seconds` have not passed.

    The smallest time of a point counts: whatever else the machine does can only add to it.
    """
    deadline = time.perf_counter() + seconds
    given = worker.options
    worker.options = given.replace(policy="d3tree")
    with borrowed_rows(worker), torch.no_grad():
        bench = _Bench(worker)
        tile = bench.tile()
        bench.sweep()
        while _first_rank_says(time.perf_counter() < deadline):
            bench.sweep()
        profile = bench.profile(key, tile)
        profile = bench.with_host_times(profile)
    worker.options = given
    worker.use_profile(None)
    worker.reset_counters()
    agreed: CostProfile = _first_rank_says(profile)
    return agreed


@contextmanager
def borrowed_rows(worker: D3TreeWorker) -> Iterator[None]:
    """Let the slot table's rows name slots while measuring; afterwards they are what they were."""
    table = worker.model_runner.req_to_token_pool.req_to_token
    before = table.clone()
    slots = worker.model_runner.token_to_kv_pool.size
    width = table.shape[1]
    for row in range(table.shape[0]):
        # Slot 0 is the sink for padding. Rows overlap where the pool is small: what they hold means nothing.
        first = row * min(_LONG_PREFIX + worker.window_width, max(slots // table.shape[0], 1))
        table[row] = (torch.arange(width, dtype=table.dtype, device=table.device) + first) % slots + 1
    try:
        yield
    finally:
        table.copy_(before)


class _Bench:
    """Timings of one worker, the best of each point so far."""

    def __init__(self, worker: D3TreeWorker) -> None:
        self._worker = worker
        self._pool = worker.model_runner.req_to_token_pool
        self._requests = min(self._pool.size, 64)
        self._verify: dict[int, float] = {}
        self._draft: dict[int, float] = {}
        self._propose: dict[int, float] = {}
        self._long: dict[tuple[int, int], float] = {}
        self._synchronize: Callable[[], None] = (
            torch.accelerator.synchronize if torch.device(worker.device).type != "cpu" else lambda: None
        )

    # ------------------------------------------------------------ what is timed

    def tile(self) -> int:
        """The row tile of this machine's matrix products, on one linear layer of every shape the target has."""
        layers: dict[tuple[int, ...], Any] = {
            tuple(module.weight.shape): module
            for name, module in self._worker.model_runner.model.named_modules()
            if isinstance(module, LinearBase) and "visual" not in name and hasattr(module, "weight")
        }
        weights = [layer.weight for layer in layers.values()]
        if not weights or not all(weight.is_floating_point() for weight in weights):
            # Quantised weights go through kernels of their own: no tile is known, and none is assumed.
            return find_tile([1], [1.0])
        # Two whole tiles of the widest kind to look for; CPU kernels know none above 64.
        widest = 64 if torch.device(self._worker.device).type == "cpu" else max(TILES)
        rows = range(1, 2 * widest + 2)
        best = dict.fromkeys(rows, float("inf"))
        for _ in range(3):
            for count in rows:
                inputs = [(layer, layer.weight.new_ones(count, layer.weight.shape[1])) for layer in layers.values()]
                best[count] = min(best[count], self._timed(partial(_products, inputs)))
        return find_tile(list(rows), list(best.values()))

    def sweep(self) -> None:
        """Time every point once, small passes more often than large ones."""
        largest = min(self._requests * self._worker.options.max_rows, _MOST_ROWS)
        for rows in _grid(largest):
            self._keep_best(self._verify, rows, self._verify_pass(rows, _SHORT_PREFIX))
        for requests, horizon in self._draft_points():
            seconds, hidden = self._draft_pass(requests, horizon)
            self._keep_best(self._draft, requests * (horizon + 1), seconds)
            anchors = torch.ones(requests, dtype=torch.int64, device=hidden.device)
            propose = self._timed(partial(self._worker._propose, hidden, anchors))
            self._keep_best(self._propose, requests * horizon, propose)
        for requests, rows in self._long_points():
            self._keep_best(self._long, (requests, rows), self._verify_pass(rows, self._long_prefix(), requests))
            self._keep_best(self._long, (-requests, rows), self._verify_pass(rows, _SHORT_PREFIX, requests))

    def _draft_points(self) -> list[tuple[int, int]]:
        whole = self._worker.block_size - 1
        points = [(1, h) for h in sorted({1, (whole + 1) // 2, whole})]
        return points + [(r, whole) for r in _grid(self._requests) if r > 1 and r & (r - 1) == 0]

    def _long_points(self) -> list[tuple[int, int]]:
        """(requests, rows): rows that share their prefixes, and rows with one each."""
        rows = min(self._worker.options.max_rows, self._requests)
        return [(1, rows), (rows, rows)] if rows > 1 else [(1, 1)]

    def _long_prefix(self) -> int:
        slots = self._worker.model_runner.token_to_kv_pool.size
        room = min(self._pool.max_context_len - 2 * self._worker.window_width, slots // 4)
        return max(_SHORT_PREFIX + 1, min(_LONG_PREFIX, room))

    # ------------------------------------------------------------ passes

    def _verify_pass(self, total: int, prefix: int, requests: int | None = None) -> float:
        worker = self._worker
        requests = requests or -(-total // worker.options.max_rows)
        rows = _some_rows(requests, total, worker)
        best = float("inf")
        for _ in range(3 if total <= 32 else 1):
            batch = self._batch(requests, prefix)
            window = open_window(batch, worker.model_runner, worker.window_width)
            best = min(best, self._timed(partial(worker._verify, batch, window, rows)))
        return best

    def _draft_pass(self, requests: int, horizon: int) -> tuple[float, torch.Tensor]:
        worker = self._worker
        batch = self._batch(requests, _SHORT_PREFIX)
        window = open_window(batch, worker.model_runner, worker.window_width)
        anchors = batch.spec_info.bonus_tokens
        worker._draft_block(batch, window, anchors, horizon)
        began = time.perf_counter()
        hidden = worker._draft_block(batch, window, anchors, horizon)
        self._synchronize()
        return time.perf_counter() - began, hidden

    def _batch(self, requests: int, prefix: int) -> Any:
        """A decode batch as the scheduler would hand it over, in rows that no request has."""
        device = self._worker.device
        lengths = torch.full((requests,), prefix, dtype=torch.int64)
        batch = ScheduleBatch(
            reqs=[],
            req_to_token_pool=self._pool,
            model_config=self._worker.model_runner.model_config,
            device=device,
        )
        batch.forward_mode = ForwardMode.DECODE
        batch.req_pool_indices = torch.arange(1, requests + 1, device=device)
        batch.seq_lens = lengths.to(device)
        batch.seq_lens_cpu = lengths
        batch.seq_lens_sum = requests * prefix
        batch.orig_seq_lens = lengths.to(device, torch.int32)
        batch.multimodal_inputs = [None] * requests
        batch.spec_algorithm = self._worker.model_runner.spec_algorithm
        batch.sampling_info = SimpleNamespace(
            is_all_greedy=True, logit_bias=None, has_watermark_candidates=False, grammars=None
        )
        tokens = torch.arange(requests, device=device) % self._worker.draft_vocabulary
        batch.spec_info = make_draft_input_v2(bonus_tokens=tokens, new_seq_lens=batch.seq_lens)
        return batch

    def _timed(self, call: Callable[[], Any]) -> float:
        self._synchronize()
        began = time.perf_counter()
        call()
        self._synchronize()
        return time.perf_counter() - began

    @staticmethod
    def _keep_best(points: dict[Any, float], at: Any, seconds: float) -> None:
        points[at] = min(seconds, points.get(at, float("inf")))

    # ------------------------------------------------------------ results

    def profile(self, key: ProfileKey, tile: int) -> CostProfile:
        """What was timed, as a profile without host times."""
        prefix = self._long_prefix() - _SHORT_PREFIX
        extra = {point: max(self._long[point] - self._long[-point[0], point[1]], 0.0) for point in self._long_points()}
        (_, rows), shared = next(iter(extra.items()))
        apart = extra.get((rows, rows), shared)
        # Two passes with the same pairs of rows and keys, one reading a prefix, the other `rows` of them.
        per_key = max(apart - shared, 0.0) / max(prefix * (rows - 1), 1)
        per_row_key = max(shared - per_key * prefix, 0.0) / (prefix * rows)
        return CostProfile(
            key=key,
            verify=_curve(self._verify),
            draft=_curve(self._draft),
            propose=_curve(self._propose),
            round_host=(0.0, 0.0),
            plain_host=(0.0, 0.0),
            per_key=per_key,
            per_row_key=per_row_key,
            tile=tile,
        )

    def with_host_times(self, profile: CostProfile) -> CostProfile:
        """Whole rounds, drafted and plain, less the passes in them."""
        drafted = self._host_line(profile, self._worker.block_size - 1)
        plain = self._host_line(profile, 0)
        return replace(profile, round_host=drafted, plain_host=plain)

    def _host_line(self, profile: CostProfile, horizon: int) -> tuple[float, float]:
        few, many = 1, min(self._requests, 16)
        times = {requests: self._host_seconds(profile, requests, horizon) for requests in (few, many)}
        if many == few:
            return times[few], 0.0
        slope = max((times[many] - times[few]) / (many - few), 0.0)
        return max(times[few] - slope * few, 0.0), slope

    def _host_seconds(self, profile: CostProfile, requests: int, horizon: int) -> float:
        worker = self._worker
        worker.use_profile(profile)
        planner = worker.planner
        worker.planner = _AlwaysHorizon(
            planner.costs, planner.max_horizon, worker.options.max_rows, device=worker.device
        )
        worker.planner.drafts = horizon
        best = float("inf")
        for _ in range(4):
            worker._decode_round(self._batch(requests, _SHORT_PREFIX), None)
            watch = worker.last_round
            passes = sum(watch.seconds.get(stage, 0.0) for stage in ("draft", "propose", "verify"))
            best = min(best, watch.total - passes)
        return best


def _products(inputs: list[tuple[Any, torch.Tensor]]) -> None:
    for layer, rows in inputs:
        layer.quant_method.apply(layer, rows, None)


def _grid(largest: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... up to `largest`, which is in it."""
    powers = [1 << i for i in range(largest.bit_length())]
    points = {p for p in powers} | {p * 3 // 2 for p in powers if p > 1}
    return sorted({p for p in points if p <= largest} | {largest})


def _curve(points: dict[int, float]) -> Curve:
    rows = sorted(points)
    return measured_curve(rows, [points[r] for r in rows])


def _some_rows(requests: int, total: int, worker: D3TreeWorker) -> VerifyRows:
    """`total` rows in trees of nearly equal size."""
    device, horizon, topk = worker.device, worker.block_size - 1, worker.options.topk
    tokens = torch.arange(topk, device=device).expand(requests, horizon, topk)
    log_probs = -(torch.arange(topk, device=device) + 1.0).log().expand(requests, horizon, topk) - 0.5
    candidates = Candidates(tokens, log_probs, torch.full((requests,), horizon, device=device))
    tree = build_tree(candidates, torch.ones(requests, dtype=torch.int64, device=device), worker.options.max_rows)
    sizes = torch.full((requests, 1), total // requests, device=device)
    sizes[: total % requests] += 1
    keep = tree.valid & (torch.arange(worker.options.max_rows, device=device) < sizes)
    return layout_rows(tree, keep, capacity=total)
