"""The speculative worker: one prefill step, one decode round.

A round is ``draft block -> candidates -> candidate tree -> survival -> budget -> verify rows -> target pass ->
accepted path -> commit``; ``_decode_round`` is that sequence. Where drafting does not pay, the verify rows are the
anchors alone and what comes before them is left out. What SGLang's DFLASH worker already does (draft model runner,
draft KV pool, prefill that writes target hidden states into the draft KV) is inherited.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2
from sglang.srt.speculative.spec_utils import draft_tp_context

from sgl_kernel_ext.cpu import build_all
from sglang_d3tree.config import D3TreeOptions, options_of
from sglang_d3tree.policy.baselines import BUDGETED, LEARNED, POLICIES
from sglang_d3tree.policy.cost import CostProfile, CostTables, cost_tables, linear_cost
from sglang_d3tree.policy.planner import PLAIN, Planner
from sglang_d3tree.runtime.accept import accept
from sglang_d3tree.runtime.calibration import cost_profile, profile_key
from sglang_d3tree.runtime.metrics import RoundCounters
from sglang_d3tree.runtime.stopwatch import Stopwatch
from sglang_d3tree.runtime.token_map import read_token_map
from sglang_d3tree.runtime.tree_head import SurvivalModel, read_head
from sglang_d3tree.runtime.verifiers import prepare_capture, target_parts, verify_positions
from sglang_d3tree.runtime.verify_input import TreeVerifyInput
from sglang_d3tree.runtime.window import RoundWindow, committed_moves, open_window, write_columns
from sglang_d3tree.tree.accept import Walk
from sglang_d3tree.tree.candidates import Candidates, draft_candidates
from sglang_d3tree.tree.edges import Edges, draft_edges
from sglang_d3tree.tree.layout import VerifyRows, anchor_rows, layout_rows

logger = logging.getLogger(__name__)

# Candidates per depth where neither the user nor a trained head says how many.
DEFAULT_TOPK = 8


class D3TreeWorker(DFlashWorkerV2):
    """Drives the draft and target model runners of one scheduler process."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        self.options: D3TreeOptions = options_of(server_args)
        self.counters = RoundCounters()
        self.profile: CostProfile | None = None
        self.last_round = Stopwatch()
        self.window_width = int(get_spec().speculative_num_draft_tokens)
        block_size = int(get_spec().speculative_dflash_block_size)
        # The parent takes SGLang's verify width for the block size; here the drafter is narrower than the verify.
        with get_spec().override(speculative_num_draft_tokens=block_size):
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
        prepare_capture(self.model_runner.model)
        vocabulary = self.model_runner.model_config.vocab_size
        draft_path = server_args.speculative_draft_model_path
        token_map = read_token_map(get_spec().speculative_token_map, draft_path, vocabulary)
        self._target_parts = target_parts(self.model_runner.model, self.draft_model, token_map)
        # Embeddings handed over with a batch are cast to bfloat16 on the way; the model's own look-up is not.
        self.draft_model.forward_embed = self._embed_block
        self._survival = self._load_survival(server_args)
        self.use_profile(None)
        if torch.device(self.device).type == "cpu":
            # Compile what is not in the cache now, not during somebody's first request.
            build_all()
            # The fused table kernel is Triton; the module's torch path computes the same.
            for layer in self.draft_model.layers:
                layer.self_attn.use_table_qk_norm_rope = False
        logger.info(
            "D3TREE: policy %s, block size %d, at most %d rows per request. Survival is %s.",
            self.options.policy,
            self.block_size,
            self.options.max_rows,
            self._survival.describe(),
        )

    def _embed_block(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._target_parts.embed(token_ids) * self._noise_embed_scale

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        # The last step of a start: pools and backends are there, and every slot is still free.
        self.use_profile(cost_profile(self))

    def use_profile(self, profile: CostProfile | None) -> None:
        """Decide by these costs from the next round on; None: by none."""
        self.profile = profile
        self._costs: CostTables | None = None
        self._verify_cost = linear_cost(self.options.max_rows, device=self.device)
        if profile is not None:
            requests = self.model_runner.req_to_token_pool.size
            self._costs = cost_tables(profile, requests, self.options.max_rows, self.block_size, self.device)
            self._verify_cost = self._costs.one_request(self.options.max_rows, self.block_size - 1)
        self._planners: dict[D3TreeOptions, Planner] = {}
        self.planner = self._planner_of(self.options)

    def _planner_of(self, options: D3TreeOptions) -> Planner:
        """One for every set of options: what was seen under one says little about another, and is kept for a return."""
        if options not in self._planners:
            self._planners[options] = Planner(
                self._costs,
                self.block_size - 1,
                options.max_rows,
                min_rows=options.min_rows,
                adaptive_horizon=options.adaptive_horizon,
                device=self.device,
            )
        return self._planners[options]

    def reset_counters(self) -> None:
        """Count from here on."""
        self.counters = RoundCounters()

    @property
    def draft_vocabulary(self) -> int:
        """Number of tokens the draft can propose."""
        return self._target_parts.vocabulary
    @property
    def survival_kind(self) -> str:
        """Kind of the trained head, or "draft"."""
        return self._survival.kind

    def _load_survival(self, server_args: Any) -> SurvivalModel:
        file = read_head(self.options.head, server_args.speculative_draft_model_path, server_args.model_path)
        model = SurvivalModel(
            file, self._target_parts.embed, self.model_runner.model_config.vocab_size, self.device
        )
        self.options = self.options.replace(topk=self.options.topk or model.topk or DEFAULT_TOPK)
        return model

    def set_options(self, **changes: Any) -> None:
        """Change run-time options between two rounds."""
        self.options = self.options.replace(**changes)
        self.planner = self._planner_of(self.options)
        logger.info("D3TREE options changed: %s", changes)

    def describe(self) -> dict[str, Any]:
        """What ``/server_info`` shows: options in force and averages since start-up."""
        return {
            "policy": self.options.policy,
            "threshold": self.options.threshold,
            "tree_rows": self.options.rows,
            "adaptive_horizon": self.options.adaptive_horizon,
            "max_rows": self.options.max_rows,
            "topk": self.options.topk,
            "block_size": self.block_size,
            "draft_vocabulary": self.draft_vocabulary,
            "cost_profile": self.options.cost_profile,
            "cost_key": asdict(profile_key(self)),
            "tile": None if self.profile is None else self.profile.tile,
            "survival": self.survival_kind,
            **self.counters.summary(),
        }

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        decoding = not (batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle())
        if decoding:
            return self._decode_round(batch, on_publish)
        return super().forward_batch_generation(batch, on_publish, grammar_barrier, pp_proxy_tensors)

    def _validate_phase1_sampling_support(self, batch: Any) -> None:
        # The parent warns that sampling falls back to greedy; this worker samples everywhere.
        return

    def _decode_round(self, batch: Any, on_publish: Any) -> GenerationBatchResult:
        watch = Stopwatch()
        anchors = batch.spec_info.bonus_tokens.view(-1)
        window = open_window(batch, self.model_runner, self.window_width)
        context = _context(batch)
        horizon = self.planner.max_horizon
        if self.options.policy in BUDGETED:
            horizon = self.planner.horizon(window.num_requests, context)
        watch.lap("prepare")

        if horizon:
            hidden = self._draft_block(batch, window, anchors, horizon)
            watch.lap("draft")
            candidates, edges = self._propose(hidden, anchors)
            watch.lap("propose")
            tree, wanted, survival = POLICIES[self.options.policy](
                candidates, edges, anchors, self.options.rows, self.options.threshold, self._verify_cost
            )
            watch.lap("tree")
            chosen = self.planner.total(tree, survival, wanted, self.options.policy in BUDGETED, context)
            watch.lap("budget")
            rows = layout_rows(tree, chosen.keep, capacity=chosen.total)
            mode, predicted = chosen.mode, chosen.seconds
            expected = (survival * chosen.keep).sum()
        else:
            rows = anchor_rows(anchors, self.options.max_rows)
            expected = torch.full((), window.num_requests, device=self.device)
            mode, predicted = PLAIN, self.planner.plain_seconds(window.num_requests, context)
        watch.lap("tree")

        target = self._verify(batch, window, rows)
        watch.lap("verify")
        walk = accept(target.next_token_logits, batch.sampling_info, self._sampler, rows, horizon, window.prefix_lens)
        new_seq_lens = window.prefix_lens + walk.accept_lens
        if on_publish is not None:
            on_publish(new_seq_lens)
        watch.lap("accept")

        self._commit(window, rows, walk, target.hidden_states)
        target.hidden_states = None
        watch.lap("commit")
        if horizon:
            self.planner.observe(tree, survival, wanted, chosen.keep, walk.accept_lens - 1)
        watch.lap("budget")
        self.last_round = watch
        self.counters.record(rows, walk, expected, mode, horizon, predicted, watch)
        return self._result(target, rows, walk, new_seq_lens)

    def _draft_block(self, batch: Any, window: RoundWindow, anchors: torch.Tensor, horizon: int) -> torch.Tensor:
        """One draft pass over ``[anchor, MASK x horizon]`` of every request.

        Returns:
            [R, horizon, H] hidden states of the positions after each anchor.
        """
        requests, block = window.num_requests, horizon + 1
        # Positions see each other both ways, whatever their number, so a shorter block is a smaller pass; only
        # drafters with convolutions index by its length.
        self.draft_model.set_block_size(block)
        block_ids = torch.full((requests, block), self._mask_token_id, dtype=torch.int64, device=self.device)
        block_ids[:, 0] = anchors
        positions = (window.prefix_lens.unsqueeze(1) + self._block_pos_offsets[:block]).flatten()
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=requests,
            input_ids=block_ids.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=window.prefix_lens,
            out_cache_loc=None,
            seq_lens_sum=batch.seq_lens_sum,
            seq_lens_cpu=batch.seq_lens_cpu,
            positions=positions,
            spec_algorithm=batch.spec_algorithm,
            spec_info=TreeVerifyInput(
                draft_token=block_ids.flatten(),
                positions=positions,
                draft_token_num=block,
                capture_hidden_mode=CaptureHiddenMode.NULL,
            ),
            capture_hidden_mode=CaptureHiddenMode.NULL,
            num_token_non_padded=(
                torch.full((), requests * block, dtype=torch.int32, device=self.device)
                if enable_num_token_non_padded()
                else None
            ),
            global_num_token_non_padded_cpu=requests * block,
            can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
        )
        window.plan.bind(forward_batch, self.draft_model_runner.kv_index_translator, cols=slice(0, block))
        with torch.inference_mode(), draft_tp_context(self.draft_parallel_layout):
            output = self.draft_model_runner.forward(forward_batch)
        return output.logits_output.hidden_states.view(requests, block, -1)[:, 1:]

    def _propose(self, hidden: torch.Tensor, anchors: torch.Tensor) -> tuple[Candidates, Edges]:
        """Candidates of every drafted position and their survival, from the positions' hidden states [R, D, H]."""
        parts = self._target_parts
        candidates = draft_candidates(parts.logits(hidden), self.options.topk, token_map=parts.token_map)
        learned = self.options.policy in LEARNED
        return candidates, self._survival.edges(candidates, hidden, anchors) if learned else draft_edges(candidates)

    def _verify(self, batch: Any, window: RoundWindow, rows: VerifyRows) -> LogitsProcessorOutput:
        """The target's pass over all retained trees: logits [T, V] and captured hidden states [T, layers * H]."""
        positions = torch.where(rows.is_padding, 0, window.prefix_lens[rows.request] + rows.depths)
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = rows.token_ids
        batch.spec_info = TreeVerifyInput(
            draft_token=rows.token_ids,
            positions=positions,
            draft_token_num=self.options.max_rows,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            verify_rows=rows,
        )
        forward_batch = ForwardBatch.init_new(
            batch,
            self.model_runner,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            return_hidden_states_before_norm=False,
            spec_mrope_positions=verify_positions(self.model_runner, batch, rows, positions),
            kv_loc_plan=window.plan,
            write_cols=write_columns(rows, window.width),
        )
        output = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True
        )
        return output.logits_output

    def _commit(self, window: RoundWindow, rows: VerifyRows, walk: Walk, hidden: torch.Tensor) -> None:
        """Keep the accepted path: its KV in consecutive slots, its target hidden states in the draft KV."""
        length = walk.path_rows.shape[1]
        if length > 1:
            target, source = committed_moves(window, rows, walk)
            physical = window.plan.write_physical
            self.model_runner.token_to_kv_pool.move_kv_cache(physical[target], physical[source])

        draft_slots = self._draft_write_ids(window.plan).view(window.num_requests, -1)[:, :length]
        positions = window.prefix_lens.unsqueeze(1) + torch.arange(length, device=walk.path_rows.device)
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden[walk.path_rows.flatten()],
            cache_loc=draft_slots.flatten(),
            cache_loc_2d=draft_slots,
            positions=positions.flatten(),
            commit_lens=walk.accept_lens,
        )

    def _result(
        self, target: LogitsProcessorOutput, rows: VerifyRows, walk: Walk, new_seq_lens: torch.Tensor
    ) -> GenerationBatchResult:
        last = (walk.accept_lens - 1).unsqueeze(1)
        return GenerationBatchResult(
            logits_output=target,
            next_token_ids=walk.token_ids.flatten(),
            accept_lens=walk.accept_lens,
            # SGLang's name for how many rows a request verified; it reports them in logs and meta_info.
            cap_lens=rows.row_offsets.diff(),
            next_draft_input=make_draft_input_v2(
                bonus_tokens=walk.token_ids.gather(1, last).squeeze(1), new_seq_lens=new_seq_lens
            ),
            speculative_num_draft_tokens=self.window_width,
            speculative_output_stride=walk.token_ids.shape[1],
            new_seq_lens=new_seq_lens,
        )

    @property
    def _sampler(self) -> Any:
        return self.model_runner.sampler


def _context(batch: Any) -> int:
    """Tokens in the prefixes of all requests, as far as the host knows; overlap scheduling may lag by a round."""
    if batch.seq_lens_sum is not None:
        return int(batch.seq_lens_sum)
    return int(batch.spec_info.nxt_kv_lens_sum)
