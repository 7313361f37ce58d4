# SPDX-License-Identifier: Apache-2.0
"""Faults that the traffic tests have to find, each planted by replacing one method of the fork or of the toy model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from vllm.v1.attention.backends.checkpoint_rows import CheckpointRows
from vllm.v1.attention.backends.gdn_checkpoint import CheckpointedGDNMetadataBuilder
from vllm.v1.core import stock_guards
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.boundary_attention import BoundaryAttentionManager
from vllm.v1.core.coalescing_kv_cache_manager import CoalescingKVCacheManager
from vllm.v1.core.sched.coalescing_scheduler import CoalescingScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.state_retention import Retention, WantedState
from vllm.v1.core.tiered_free_queue import TieredFreeQueue
from vllm_kda_prefill.toymodel.blocks import Blocks
from vllm_kda_prefill.toymodel.migration import Migration
from vllm_kda_prefill.toymodel.worker import ToyWorker

Plant = Callable[[], AbstractContextManager[Any]]


def around(owner: Any, name: str, change: Callable[..., Any]) -> Plant:
    """Replace a method by `change(original, self, *arguments)`."""

    @contextmanager
    def planted() -> Iterator[None]:
        original = getattr(owner, name)

        def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
            return change(original, self, *args, **kwargs)

        with patch.object(owner, name, changed):
            yield

    return planted


def replan(change: Callable[[Any], Any]) -> Plant:
    """Change each plan behind the scheduler's back."""

    def bind(original: Any, scheduler: Any, *args: Any) -> Any:
        plan = original(scheduler, *args)
        return plan if plan is None else change(plan)

    return around(CoalescingScheduler, "_bind", bind)


def first_only(plan: Any) -> Any:
    block_ids = {group: own[:1] for group, own in plan.block_ids.items()}
    return dataclasses.replace(plan, positions=plan.positions[:1], block_ids=block_ids)


def earlier(plan: Any) -> Any:
    """Every state 16 tokens too early."""
    positions = tuple(position - 16 for position in plan.positions)
    return plan if positions[0] <= plan.start else dataclasses.replace(plan, positions=positions)


def stale(original: Any, scheduler: Any, output: Any) -> None:
    """A request keeps the plan of the step before."""
    original(scheduler, output)
    plans = output.kda_prefill_plans
    kept = {i: plan for i, plan in vars(scheduler).get("_kept", {}).items() if i in output.num_scheduled_tokens}
    scheduler._kept = dict(plans)
    plans.update(kept)


@contextmanager
def rolled_rows() -> Iterator[None]:
    """Destinations of one row with the next row's offsets."""
    original = CheckpointedGDNMetadataBuilder.bind

    def bind(builder: Any, rows: CheckpointRows | None, group: int) -> None:
        if rows is not None:
            rolled = {other: own[::-1].copy() for other, own in rows.block_ids.items()}
            rows = CheckpointRows(rows.offsets, rolled)
        original(builder, rows, group)

    with patch.object(CheckpointedGDNMetadataBuilder, "bind", bind):
        yield


@contextmanager
def first_groups_rows() -> Iterator[None]:
    original = CheckpointedGDNMetadataBuilder.bind

    def bind(builder: Any, rows: CheckpointRows | None, group: int) -> None:
        original(builder, rows, group if rows is None else min(rows.block_ids, default=group))

    with patch.object(CheckpointedGDNMetadataBuilder, "bind", bind):
        yield


def shifted(original: Any, worker: Any, block_id: int, after: int, state: Any, history: Any) -> None:
    """Exports take the raw rows one token too early."""
    original(worker, block_id, after, state, history)
    if after > 3:
        worker.blocks.write_window(block_id, history[after - 1 : after + 2])


def running_block(original: Any, manager: Any, request: Any, wanted: Any) -> Any:
    """An export into the block of the request's own running state."""
    granted, blocks = original(manager, request, wanted)
    for position, block_ids in granted.items():
        for mamba in manager.groups.mamba:
            own = [block for block in mamba.req_to_blocks[request.request_id] if not block.is_null]
            granted[position] = block_ids | {mamba.kv_cache_group_id: own[-1].block_id}
        break
    return granted, blocks


def speculative_block(original: Any, manager: Any, request: Any, wanted: Any) -> Any:
    """An export into a block that the request's drafts will write."""
    granted, blocks = original(manager, request, wanted)
    for position, block_ids in granted.items():
        for mamba in manager.groups.mamba:
            if mamba.num_speculative_blocks:
                own = mamba.req_to_blocks[request.request_id][-1]
                granted[position] = block_ids | {mamba.kv_cache_group_id: own.block_id}
        break
    return granted, blocks


def next_column(original: Any, manager: Any, request: Any) -> Any:
    """Stock's checkpoint in the block of the next column."""
    found = original(manager, request)
    if found is None:
        return None
    block_ids = {}
    for mamba in manager.groups.mamba:
        column = mamba._checkpoints[request.request_id][1] + 1
        block_ids[mamba.kv_cache_group_id] = mamba.req_to_blocks[request.request_id][column].block_id
    return found[0], block_ids


def source_block(original: Any, manager: Any, request: Any, wanted: Any) -> Any:
    """An export into the block with the state that the query resumes from."""
    granted, blocks = original(manager, request, wanted)
    for position, block_ids in granted.items():
        for mamba in manager.groups.mamba:
            column = (request.num_computed_tokens - 1) // mamba.block_size
            block = mamba.req_to_blocks[request.request_id][column]
            if column >= 0 and not block.is_null:
                granted[position] = block_ids | {mamba.kv_cache_group_id: block.block_id}
        break
    return granted, blocks


def draft_shifted(
    original: Any, memory: Any, group: int, window_source: int, shift: int, state_source: int, destination: int
) -> None:
    """The state after the accepted drafts with the window of one draft less."""
    original(memory, group, window_source, max(shift - 1, 0), state_source, destination)


def padded(original: Any, scheduler: Any, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> int:
    """A prompt of one token keeps its placeholder drafts."""
    if request.num_tokens < num_new_tokens:
        return num_new_tokens
    return original(scheduler, request, num_new_tokens, *args, **kwargs)


def past_its_block(original: Any, scheduler: Any, request: Any, tokens: int, hit: int = 0, external: int = 0) -> int:
    """A chunk that starts inside a block ends where stock's does."""
    if (request.num_computed_tokens + hit + external) % scheduler.retention.grid.mamba_block:
        return Scheduler._mamba_block_aligned_split(scheduler, request, tokens, hit, external)
    return original(scheduler, request, tokens, hit, external)


def free_twice(original: Any, scheduler: Any, blocks: Any, fence: int) -> None:
    original(scheduler, blocks, fence)
    original(scheduler, blocks[:1], fence)


def next_name(original: Any, manager: Any, request: Any, mamba: Any, block: Any, state: WantedState) -> None:
    """A state under the name of the boundary before."""
    position = max(state.position - mamba.block_size, mamba.block_size)
    original(manager, request, mamba, block, WantedState(position, state.protected))


def too_early(original: Any, migration: Any, request: Any, count: int) -> None:
    """Resume from the first speculative column whatever was accepted."""
    if request.accepted > 1:
        request.accepted -= 1
    original(migration, request, count)


def one_boundary_more(original: Any, manager: Any, request: Any, first: int, num_tokens: int) -> None:
    """A block gets the name of the next boundary as well, which a later step fills."""
    hashed = len(request.block_hashes) * manager.block_pool.hash_block_size
    held = len(manager.req_to_blocks[request.request_id]) * manager.block_size
    original(manager, request, first, min(num_tokens + manager.boundary_step, hashed, held))


def whole_blocks_withdrawn(original: Any, manager: Any, request: Any) -> None:
    """A preempted request's blocks that end on a boundary inside them keep their names."""
    for group in manager.coordinator.single_type_managers:
        for block in group.req_to_blocks.get(request.request_id, ()):
            tokens = block.block_hash_num_tokens or 0
            if tokens > request.num_computed_tokens and tokens % group.block_size == 0:
                manager.block_pool._maybe_evict_cached_block(block)


def first_name_removed(original: Any, pool: Any, block: Any) -> Any:
    """A block that gets a new owner keeps all its names but the first."""
    kept = pool.cached_block_hashes_by_block.pop(block.block_id, None)
    removed = original(pool, block)
    if kept:
        pool.cached_block_hashes_by_block[block.block_id] = kept
    return removed


def nothing(*args: Any, **kwargs: Any) -> None:
    """Leave it out."""


MUTANTS: dict[str, Plant] = {
    "state named after the boundary before": around(CoalescingKVCacheManager, "_publish", next_name),
    "hash published, plan dropped": replan(lambda plan: None),
    "deeper states of a plan not written": replan(first_only),
    "states exported 16 tokens early": replan(earlier),
    "blocks of a plan in reverse order": replan(
        lambda plan: dataclasses.replace(plan, block_ids={g: own[::-1] for g, own in plan.block_ids.items()})
    ),
    "plan bound to another span": replan(lambda plan: dataclasses.replace(plan, end=plan.end + 1)),
    "stale plan in the next step": around(CoalescingScheduler, "_update_after_schedule", stale),
    "rows of two requests swapped": rolled_rows,
    "second group writes the first group's blocks": first_groups_rows,
    "export into the running state's block": around(CoalescingKVCacheManager, "grant", running_block),
    "export into a speculative block": around(CoalescingKVCacheManager, "grant", speculative_block),
    "checkpoint in the next block column": around(CoalescingKVCacheManager, "stock_checkpoint", next_column),
    "export into the block the query resumes from": around(CoalescingKVCacheManager, "grant", source_block),
    "export's block never freed": around(CoalescingScheduler, "_free_cow_retained_blocks", nothing),
    "export's block freed twice": around(CoalescingScheduler, "_free_cow_retained_blocks", free_twice),
    "block taken by a hit stays in the free list": around(TieredFreeQueue, "remove", nothing),
    "preemption keeps unwritten entries": around(stock_guards, "withdraw_unwritten", nothing),
    "unwritten block copied for a hit": around(stock_guards, "copies_unwritten_block", lambda *args: False),
    "boundary named before it is filled": around(BoundaryAttentionManager, "_name_boundaries", one_boundary_more),
    "preemption keeps unwritten boundaries": around(stock_guards, "withdraw_unwritten", whole_blocks_withdrawn),
    "hit at a boundary writes into the shared block": around(
        BoundaryAttentionManager, "_has_partial_local_hit", lambda *args: False
    ),
    "rewritten block keeps its boundaries": around(BlockPool, "_remove_cached_block_hashes", first_name_removed),
    "boundaries inside a block not named": around(BoundaryAttentionManager, "_name_boundaries", nothing),
    "decode names what its step writes": around(
        BoundaryAttentionManager, "_nameable", lambda original, manager, request, num_tokens: num_tokens
    ),
    "convolution window one token early": around(ToyWorker, "_export", shifted),
    "convolution window shifted by a draft": around(Blocks, "move", draft_shifted),
    "copy-on-write not executed": around(ToyWorker, "_copy_blocks", nothing),
    "state resumed before the last accepted draft": around(Migration, "before", too_early),
    "boundary state not saved after drafts": around(Migration, "after", nothing),
    "one-token prompt padded with drafts": around(CoalescingScheduler, "_mamba_block_aligned_split", padded),
    "chunk inside a block runs past its end": around(CoalescingScheduler, "_mamba_block_aligned_split", past_its_block),
    "shared-prefix junction forgotten": around(Retention, "junction", lambda *args: 0),
    "checkpoints of the ladder forgotten": around(Retention, "checkpoint_positions", lambda *args: ()),
}
