# SPDX-License-Identifier: Apache-2.0
"""The scheduler's part: run the span that needs no stop, then bind what it exports.

A plan is made once, from what the step really runs: `_mamba_block_aligned_split` proposes a query span and
`_update_after_schedule`, when nothing can change any more, binds the states that this exact span exports. A
request whose token count changed in between keeps stock's own checkpoint at most.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.v1.core import stock_guards
from vllm.v1.core.admission_room import has_room
from vllm.v1.core.coalescing_kv_cache_manager import BlockIds, CoalescingKVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.prefill_plan import MAX_CHECKPOINTS, PLANS_ATTRIBUTE, PrefillPlan
from vllm.v1.core.prefill_plan_stats import Fallback, PrefillPlanStats
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.state_retention import Retention
from vllm.v1.core.step_prefill import StepPrefill
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request, RequestStatus

logger = init_logger(__name__)


class CoalescingScheduler(Scheduler):
    """vLLM's scheduler, retaining up to four states inside one query.

    Attributes:
        retention: Which states of a prompt are retained.
        plan_stats: What the planner did.
    """

    kv_cache_manager: CoalescingKVCacheManager

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_cache_manager = CoalescingKVCacheManager.adopt(self.kv_cache_manager, self.num_lookahead_tokens)
        grid = self.kv_cache_manager.grid
        stock_guards.check_hit_alignment(grid)
        self.cache_config = stock_guards.with_mamba_block_size(self.cache_config, grid.mamba_block)
        self.retention = Retention(
            grid=grid,
            policy=envs.VLLM_B12X_KDA_PREFILL_RETENTION,
            interval=self.kv_cache_config.prefix_cache_retention_interval,
        )
        self.plan_stats = PrefillPlanStats()
        self._step: dict[str, StepPrefill] = {}
        logger.info(
            "KDA prefill coalescing: blocks of %d tokens (lookup %d, scheduler %d, attention %d), "
            "policy %s, retention interval %s, up to %d states a query span",
            grid.mamba_block,
            grid.hit_alignment,
            grid.scheduler_block,
            grid.attention_step,
            self.retention.policy,
            self.retention.interval,
            MAX_CHECKPOINTS,
        )

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._step.clear()
        return super().schedule(throttle_prefills)

    # Propose.

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Propose the query span stock would run if it had no state to retain on the way."""
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        if start >= request.num_prompt_tokens and start >= request.num_tokens - 1:
            return num_new_tokens  # Decoding: most calls.
        if stock_guards.is_padded_prompt(request, start, num_new_tokens):
            return request.num_tokens
        is_admission = request.num_computed_tokens == 0
        if is_admission:
            if self._waits_for_this_step(request, start, num_new_local_computed_tokens):
                return 0
            self.kv_cache_manager.learn_from(request, start)
        stock_tokens = super()._mamba_block_aligned_split(
            request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens
        )
        stock_tokens = stock_guards.end_with_the_block(start, stock_tokens, self.retention.grid.mamba_block)
        fallback = self._fallback(request, start, num_external_computed_tokens)
        prefill = StepPrefill(start, start + stock_tokens, is_admission, fallback)
        if fallback is None:
            prefill = self._coalesced(request, prefill, start + num_new_tokens)
        self._step[request.request_id] = prefill
        return prefill.end - start

    def _waits_for_this_step(self, request: Request, start: int, num_hit_tokens: int) -> bool:
        """Whether a request that could be admitted has to wait until this step's forward pass has run.

        It would copy a block which that pass still has to write; or it can resume deeper at a state which that
        pass exports. Stock makes a request wait for a state that is published in the same step; exports are
        published when the step is complete, so the request would not see them and compute the prefix again.
        """
        if not self._step:
            return False
        # As stock looked the hit up: another output of the request may be cached less far.
        other = self.aux_output_connector
        most = self.kv_cache_manager.lookup_limit(request, other.max_cache_hit(request) if other is not None else None)
        if stock_guards.copies_unwritten_block(self.kv_cache_manager, request, num_hit_tokens, self._step, most):
            return True
        unit, hashes = self.hash_block_size, request.block_hashes
        return any(
            start < position <= request.shared_prefix_boundary and hashes[position // unit - 1] == block_hash
            for prefill in self._step.values()
            for block_hash, position in prefill.shared_states.items()
        )

    def _fallback(self, request: Request, start: int, num_external_tokens: int) -> Fallback | None:
        """Why a prefill keeps stock's span, whatever room there is; None if it need not."""
        if start >= request.num_prompt_tokens or request.num_output_tokens:
            return Fallback.REPLAYED_OUTPUT
        if num_external_tokens:
            return Fallback.EXTERNAL_LOAD
        if start % self.retention.grid.mamba_block:
            return Fallback.UNALIGNED_START
        if any(f.mm_position.offset + f.mm_position.length > start for f in request.mm_features):
            return Fallback.ENCODER_INPUT
        return None

    def _coalesced(self, request: Request, stock: StepPrefill, last: int) -> StepPrefill:
        """The span without stops for states, where it is longer than stock's and there is room for it.

        Args:
            request: The request of the span.
            stock: Stock's span.
            last: Where the span could end at most.
        """
        # The span ends with the prompt, or on the grid of Mamba blocks. Stock's own end counts where a block is wider
        # than a chunk may be: it advances inside the block.
        end = last if last >= request.num_prompt_tokens else last - last % self.retention.grid.mamba_block
        if end <= stock.end:
            return stock
        if not self._has_room(request, stock.start):
            return replace(stock, fallback=Fallback.NO_ROOM)
        return replace(stock, end=end, shared_states=self._shared_states(request, stock.start, end))

    def _has_room(self, request: Request, start: int) -> bool:
        others = itertools.chain(self.running, self.kv_holding_waiting, self.waiting)
        # A chunk may be as short as a block, where others share the step.
        steps = 1 + math.ceil((request.num_prompt_tokens - start) / self.retention.grid.mamba_block)
        decoded = steps * (1 + self.num_spec_tokens) + self.num_lookahead_tokens
        return has_room(self.kv_cache_manager, request, others, self.num_lookahead_tokens, decoded)

    def _shared_states(self, request: Request, start: int, end: int) -> dict[BlockHash, int]:
        """The states that stock would have published in this step, at a stop inside the span `[start, end)`."""
        unit = self.hash_block_size
        prompt, junction = request.num_prompt_tokens, request.shared_prefix_boundary
        return {
            request.block_hashes[state.position // unit - 1]: state.position
            for state in self.retention.wanted(prompt, start, end, junction)
            if state.protected
        }

    # Bind.

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        plans: dict[str, PrefillPlan] = {}
        granted_blocks: list[KVCacheBlock] = []
        for request_id in self._step:
            num_tokens = scheduler_output.num_scheduled_tokens.get(request_id)
            if num_tokens is None:
                continue
            plan = self._bind(self.requests[request_id], num_tokens, granted_blocks)
            if plan is not None:
                plans[request_id] = plan
        # Only now, for two exports of one step cannot share a block. As soon as the step is in order behind
        # whoever reads these blocks, they are free to evict.
        self._free_cow_retained_blocks(granted_blocks, self.sched_step_seq)
        setattr(scheduler_output, PLANS_ATTRIBUTE, plans)
        super()._update_after_schedule(scheduler_output)

    def _bind(self, request: Request, num_tokens: int, granted_blocks: list[KVCacheBlock]) -> PrefillPlan | None:
        """Bind the exports of one prefill span; publish its end state where that is worth keeping.

        The blocks that exports took are in use and added to `granted_blocks`, for the caller to free.
        """
        prefill = self._step[request.request_id]
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        stock = self.kv_cache_manager.stock_checkpoint(request)
        exports: dict[int, BlockIds] = dict([stock]) if stock is not None else {}
        if prefill.fallback is not None:
            self.plan_stats.record_fallback(prefill.fallback)
        elif prefill.end != end:
            self.plan_stats.record_fallback(Fallback.SPAN_CHANGED)
        else:
            self._export(request, start, end, exports, granted_blocks)
        if not exports:
            return None
        positions = tuple(sorted(exports))
        groups = exports[positions[0]]
        block_ids = {group: tuple(exports[position][group] for position in positions) for group in groups}
        plan = PrefillPlan(start, end, positions, block_ids)
        self.plan_stats.log_plan(request.request_id, plan)
        return plan

    def _export(
        self,
        request: Request,
        start: int,
        end: int,
        exports: dict[int, BlockIds],
        granted_blocks: list[KVCacheBlock],
    ) -> None:
        """Add the states of the span `[start, end)` that are worth keeping to `exports`, and publish its end state."""
        prompt, junction = request.num_prompt_tokens, request.shared_prefix_boundary
        wanted = self.retention.wanted(prompt, start, end, junction, exports)
        granted, blocks = self.kv_cache_manager.grant(request, wanted)
        exports |= granted
        granted_blocks += blocks
        if end < prompt:
            end_state = self.retention.end_state(prompt, end, junction)
            if end_state is not None:
                self.kv_cache_manager.retain_end_state(request, end_state)
        self.plan_stats.record_span(len(exports), len(wanted) - len(granted))

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        stock_guards.withdraw_unwritten(self.kv_cache_manager, request)
        super()._preempt_request(request, timestamp, drop_stale_output)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        finished = super().finish_requests(request_ids, finished_status)
        # How the engine core recovers from a fault, and how it pauses: the two cannot be told apart here.
        if request_ids is None and self.parallel_config.enable_fault_tolerance:
            self.kv_cache_manager.forget_dropped_steps()
        return finished

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            # See vllm/v1/metrics/kda_prefill.py for why there.
            stats.waiting_lora_adapters = self.plan_stats.take_changes(self.kv_cache_manager.eviction.levels())
        return stats


class CoalescingAsyncScheduler(CoalescingScheduler, AsyncScheduler):
    """The same for asynchronous scheduling."""


def create_scheduler(**kwargs: Any) -> Scheduler:
    """Make the scheduler that the engine's configuration asks for; the value of `scheduler_cls`.

    vLLM resolves whether scheduling is asynchronous after it has let models adjust the configuration.
    """
    async_scheduling = kwargs["vllm_config"].scheduler_config.async_scheduling
    return (CoalescingAsyncScheduler if async_scheduling else CoalescingScheduler)(**kwargs)
