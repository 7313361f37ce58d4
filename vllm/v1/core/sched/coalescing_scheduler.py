# SPDX-License-Identifier: Apache-2.0
"""The scheduler's part: run the span that needs no stop, then bind what it exports.

A plan is made once, from what the step really runs: `_mamba_block_aligned_split` proposes a query span and
`_update_after_schedule`, when nothing can change any more, binds the states that this exact span exports. A
request whose token count changed in between keeps stock's own checkpoint at most.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.plugins.kda_prefill_coalescing import GATE, SPLIT_TARGET
from vllm.v1.core.coalescing_kv_cache_manager import CoalescingKVCacheManager, Pages, StepPrefill
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.prefill_plan import PLANS_ATTRIBUTE, PrefillPlan
from vllm.v1.core.prefill_plan_stats import Fallback, PrefillPlanStats
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.state_retention import Retention
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request

logger = init_logger(__name__)


class CoalescingSchedulerMixin(Scheduler):
    """Goes before `Scheduler` or `AsyncScheduler` among the bases."""

    kv_cache_manager: CoalescingKVCacheManager

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_cache_manager = CoalescingKVCacheManager.adopt(self.kv_cache_manager)
        self.retention = Retention(
            grid=self.kv_cache_manager.grid,
            policy=envs.VLLM_B12X_KDA_PREFILL_RETENTION,
            interval=self.kv_cache_config.prefix_cache_retention_interval,
        )
        self.plan_stats = PrefillPlanStats()
        self._prefills: dict[str, StepPrefill] = {}
        self._span_ends: dict[str, int] = {}
        self._fallbacks: dict[str, Fallback] = {}
        self._shared_states: dict[BlockHash, int] = {}
        grid = self.retention.grid
        if grid.hit_alignment > grid.mamba_block:
            # Stock then exports a prompt's last state into a page that a later boundary belongs to, and with
            # asynchronous scheduling publishes it a second time, as that boundary's (docs/upstream.md).
            raise ValueError(
                f"recurrent pages of {grid.mamba_block} tokens are smaller than the {grid.hit_alignment} tokens that "
                f"prefix-cache hits are aligned to: set {SPLIT_TARGET} to {grid.mamba_block} or a divisor of it, or "
                f"serve with {GATE}=0"
            )
        # Stock ends chunks on multiples of this configuration's block size, its smallest page, and takes it for
        # the Mamba page. Where that is wider, chunks would end inside it and be published as its end.
        self.cache_config = copy.copy(self.cache_config)
        self.cache_config.block_size = grid.mamba_block
        logger.info(
            "KDA prefill coalescing: pages of %d tokens (lookup %d, scheduler %d, attention block %d), "
            "policy %s, retention interval %s",
            grid.mamba_block,
            grid.hit_alignment,
            grid.scheduler_block,
            grid.attention_block,
            self.retention.policy,
            self.retention.interval,
        )

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._prefills.clear()
        self._span_ends.clear()
        self._fallbacks.clear()
        self._shared_states.clear()
        return super().schedule(throttle_prefills)

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
        if start == 0 and num_new_tokens > request.num_tokens:
            # A prompt of one token, padded with placeholder drafts. With no state before it the worker runs it
            # as a prefill, which keeps the state after the placeholders; one token alone is right.
            return request.num_tokens
        is_admission = request.num_computed_tokens == 0
        if is_admission and self._waits_for_this_step(request, start, num_new_local_computed_tokens):
            return 0
        if is_admission:
            self.kv_cache_manager.learn_from(request, start)
        self._prefills[request.request_id] = StepPrefill(start, is_admission)
        stock_tokens = super()._mamba_block_aligned_split(
            request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens
        )
        inside_page = start % self.retention.grid.mamba_block
        if inside_page:
            # A prefill that resumes inside a page fills that page first. Stock runs on where it exports the
            # prompt's tail, and then publishes the state it resumed from as the one at the page's end.
            stock_tokens = min(stock_tokens, self.retention.grid.mamba_block - inside_page)
        if start >= request.num_prompt_tokens:
            self._fallbacks[request.request_id] = Fallback.REPLAYED_OUTPUT
            return stock_tokens
        fallback = self._fallback(request, start, num_external_computed_tokens)
        end = start + stock_tokens
        if fallback is None:
            # Stock's own end counts where a page is wider than a chunk may be: it advances inside the page.
            end = max(end, self._span_end(request, start + num_new_tokens))
            if end > start + stock_tokens and not self._has_room(request, start):
                fallback = Fallback.NO_ROOM
        if fallback is not None:
            self._fallbacks[request.request_id] = fallback
            return stock_tokens
        self._span_ends[request.request_id] = end
        if end > start + stock_tokens:
            self._announce_shared_states(request, start, end)
        return end - start

    def _announce_shared_states(self, request: Request, start: int, end: int) -> None:
        """Note the states that stock would have published in this step, at a stop inside this span."""
        unit = self.hash_block_size
        prompt, junction = request.num_prompt_tokens, request.shared_prefix_boundary
        for state in self.retention.wanted(prompt, start, end, junction):
            if state.protected:
                self._shared_states[request.block_hashes[state.position // unit - 1]] = state.position

    def _waits_for_this_step(self, request: Request, start: int, num_hit_tokens: int) -> bool:
        """Whether a request that could be admitted has to wait until this step's forward pass has run.

        It would copy a block which that pass still has to write; or it can resume deeper at a state which that
        pass exports. Stock makes a request wait for a state that is published in the same step; exports are
        published when the step is complete, so the request would not see them and compute the prefix again.
        """
        if self._prefills:
            # As stock looked the hit up: another output of the request may be cached less far.
            other = self.aux_output_connector
            most = other.max_cache_hit(request) if other is not None else None
            if self.kv_cache_manager.copies_unwritten_block(request, num_hit_tokens, self._prefills, most):
                return True
        unit, hashes = self.hash_block_size, request.block_hashes
        return any(
            start < position <= request.shared_prefix_boundary and hashes[position // unit - 1] == block_hash
            for block_hash, position in self._shared_states.items()
        )

    def _has_room(self, request: Request, start: int) -> bool:
        others = itertools.chain(self.running, self.kv_holding_waiting, self.waiting)
        # A chunk may be as short as a page, where others share the step.
        steps = 1 + math.ceil((request.num_prompt_tokens - start) / self.retention.grid.mamba_block)
        decoded = steps * (1 + self.num_spec_tokens) + self.num_lookahead_tokens
        return self.kv_cache_manager.has_room(request, others, self.num_lookahead_tokens, decoded)

    def _span_end(self, request: Request, end: int) -> int:
        """Where a query that could run to `end` ends: with the prompt, or on the page grid."""
        return end if end >= request.num_prompt_tokens else end - end % self.retention.grid.mamba_block

    def _fallback(self, request: Request, start: int, num_external_tokens: int) -> Fallback | None:
        if request.num_output_tokens:
            return Fallback.REPLAYED_OUTPUT
        if num_external_tokens:
            return Fallback.EXTERNAL_LOAD
        if start % self.retention.grid.mamba_block:
            return Fallback.UNALIGNED_START
        if any(f.mm_position.offset + f.mm_position.length > start for f in request.mm_features):
            return Fallback.ENCODER_INPUT
        return None

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        plans: dict[str, PrefillPlan] = {}
        granted_blocks: list[KVCacheBlock] = []
        for request_id in self._prefills:
            num_tokens = scheduler_output.num_scheduled_tokens.get(request_id)
            if num_tokens is None:
                continue
            plan = self._bind(self.requests[request_id], num_tokens, granted_blocks)
            if plan is not None:
                plans[request_id] = plan
        # Only now, for two exports of one step cannot share a page. As soon as the step is in order behind
        # whoever reads these pages, they are free to evict.
        self._free_cow_retained_blocks(granted_blocks, self.sched_step_seq)
        setattr(scheduler_output, PLANS_ATTRIBUTE, plans)
        super()._update_after_schedule(scheduler_output)

    def _bind(self, request: Request, num_tokens: int, granted_blocks: list[KVCacheBlock]) -> PrefillPlan | None:
        """Bind the exports of one prefill span; publish its end state where that is worth keeping.

        The pages that exports took are in use and added to `granted_blocks`, for the caller to free.
        """
        manager = self.kv_cache_manager
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        stock = manager.stock_checkpoint(request)
        exports: dict[int, Pages] = dict([stock]) if stock is not None else {}
        if self._span_ends.get(request.request_id) == end:
            prompt, junction = request.num_prompt_tokens, request.shared_prefix_boundary
            wanted = self.retention.wanted(prompt, start, end, junction, exports)
            granted, blocks = manager.grant(request, wanted)
            exports |= granted
            granted_blocks += blocks
            if end < prompt:
                end_state = self.retention.end_state(prompt, end, junction)
                if end_state is not None:
                    manager.retain_end_state(request, end_state)
            self.plan_stats.record_span(len(exports), len(wanted) - len(granted))
        elif request.request_id in self._fallbacks:
            self.plan_stats.record_fallback(self._fallbacks[request.request_id])
        else:
            self.plan_stats.record_fallback(Fallback.SPAN_CHANGED)
        if not exports:
            return None
        positions = tuple(sorted(exports))
        block_ids = {
            group: tuple(exports[position][group] for position in positions) for group in exports[positions[0]]
        }
        plan = PrefillPlan(start, end, positions, block_ids)
        self.plan_stats.log_plan(request.request_id, plan)
        return plan

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        self.kv_cache_manager.withdraw_unwritten(request)
        super()._preempt_request(request, timestamp, drop_stale_output)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            # See vllm/v1/metrics/kda_prefill.py for why there.
            manager = self.kv_cache_manager
            levels = {"pages": manager.free_queue.num_second_class, "share": manager.share.pages}
            stats.waiting_lora_adapters = self.plan_stats.take_changes(levels)
        return stats


class CoalescingScheduler(CoalescingSchedulerMixin, Scheduler):
    """vLLM's scheduler, retaining up to four states inside one query."""


class CoalescingAsyncScheduler(CoalescingSchedulerMixin, AsyncScheduler):
    """The same for asynchronous scheduling."""


def create_scheduler(**kwargs: Any) -> Scheduler:
    """Make the scheduler that the engine's configuration asks for; the value of `scheduler_cls`.

    vLLM resolves whether scheduling is asynchronous after it has let models adjust the configuration.
    """
    async_scheduling = kwargs["vllm_config"].scheduler_config.async_scheduling
    return (CoalescingAsyncScheduler if async_scheduling else CoalescingScheduler)(**kwargs)
