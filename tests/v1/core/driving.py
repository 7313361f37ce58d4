# SPDX-License-Identifier: Apache-2.0
"""Short ways to drive the coalescing scheduler through whole prompts."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.state_retention import Policy
from vllm.v1.request import Request
from vllm_kda_prefill.planning import Engine, Layout

Spans = list[tuple[int, int, tuple[int, ...]]]


def words(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def prefill(engine: Engine, name: str, tokens: list[int], max_tokens: int = 1) -> tuple[Request, Spans]:
    """Run a request alone to its end; its prefill spans with the checkpoints that each exports."""
    request = engine.add(name, tokens, max_tokens)
    spans: Spans = []
    while engine.scheduler.requests:
        start = request.num_computed_tokens
        output = engine.step()
        if start < len(tokens):
            new = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            start = new.get(name, start)
            plan = output.kda_prefill_plans.get(name)
            spans.append((start, start + output.num_scheduled_tokens[name], plan.positions if plan else ()))
    return request, spans


def build(dcp: int = 1, mtp: int = 0, policy: Policy = "ladder", asynchronous: bool = False, **layout: Any) -> Engine:
    return Engine.build(Layout(dcp=dcp, mtp=mtp, **layout), "coalesced", policy, asynchronous)


def evict_states(engine: Engine) -> int:
    """Take every recurrent state out of the prefix cache, and leave the attention blocks."""
    manager = engine.scheduler.kv_cache_manager
    groups = [i for i, g in enumerate(engine.scheduler.kv_cache_config.kv_cache_groups) if i]
    pool = manager.block_pool
    states = {
        block.block_id
        for key, found in list(pool.cached_block_hash_to_block._cache.items())
        for block in (found.values() if isinstance(found, dict) else (found,))
        if int.from_bytes(key[-4:], "big") in groups
    }
    manager.evict_blocks(states)
    return len(states)
