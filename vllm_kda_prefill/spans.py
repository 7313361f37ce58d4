# SPDX-License-Identifier: Apache-2.0
"""What a prefill did: its query spans, the states they export, and the states the prefix cache then holds."""

from __future__ import annotations

from dataclasses import dataclass

# The platform first: see there.
import vllm_kda_prefill.planning_platform  # noqa: F401  # isort: skip

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.prefill_plan import PLANS_ATTRIBUTE
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.request import Request
from vllm_kda_prefill.planning import Engine


@dataclass(frozen=True)
class QuerySpan:
    """One request's tokens in one step: `[start, end)`, and the states exported inside it."""

    start: int
    end: int
    checkpoints: tuple[int, ...]


def mamba_managers(manager: KVCacheManager) -> list[MambaManager]:
    """The managers of a hybrid model's recurrent KV cache groups."""
    return [m for m in manager.coordinator.single_type_managers if isinstance(m, MambaManager)]


def query_span(engine: Engine, output: SchedulerOutput, request_id: str) -> QuerySpan | None:
    """The span of a request in a step that has just been scheduled, or None if it is not in the step."""
    if request_id not in output.num_scheduled_tokens:
        return None
    cached = output.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    starts |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    start = starts[request_id]
    plans = getattr(output, PLANS_ATTRIBUTE, None)
    if plans is None:
        checkpoints = _stock_checkpoint(engine, request_id)
    else:
        checkpoints = plans[request_id].positions if request_id in plans else ()
    return QuerySpan(start, start + output.num_scheduled_tokens[request_id], checkpoints)


def _stock_checkpoint(engine: Engine, request_id: str) -> tuple[int, ...]:
    """The one state that stock's allocation of this step exports inside the query, if stock keeps it."""
    manager = mamba_managers(engine.scheduler.kv_cache_manager)[0]
    if request_id not in manager._checkpoints:
        return ()
    position, column = manager._checkpoints[request_id]
    block = manager.req_to_blocks[request_id][column]
    return (position,) if block.block_hash_num_tokens == position else ()


def retained_states(engine: Engine, request: Request) -> tuple[int, ...]:
    """Positions of a request's prompt whose state the block pool returns, in every recurrent group."""
    scheduler = engine.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    groups = [m.kv_cache_group_id for m in mamba_managers(scheduler.kv_cache_manager)]
    unit = scheduler.hash_block_size
    hashes = request.block_hashes[: request.num_prompt_tokens // unit]
    return tuple(
        (index + 1) * unit
        for index, block_hash in enumerate(hashes)
        if pool.get_cached_block(block_hash, groups) is not None
    )
