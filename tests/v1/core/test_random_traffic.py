# SPDX-License-Identifier: Apache-2.0
"""Random traffic over small pools: nothing ever reads, keeps or promises a state that was not computed.

`ShadowWorker` (shadow_worker.py) checks after every step: what each row reads and attends to, that no block has two
writers, that worker and scheduler agree on block tables, reference counts, free lists and tiers, and that every entry
of the prefix cache leads to what its hash promises.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm.v1.core import stock_guards
from vllm.v1.core.coalescing_kv_cache_manager import CoalescingKVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.state_retention import POLICIES
from vllm.v1.request import RequestStatus
from vllm_kda_prefill.planning import Engine, Layout

SIZES = [(16, 16), (16, 16), (16, 32), (32, 16), (16, 64)]
"""Attention and Mamba blocks; small, for everything scales with them."""


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    attention, mamba = draw(st.sampled_from(SIZES))
    # Attention blocks wider than Mamba blocks are refused on one rank.
    dcp = draw(st.sampled_from([1, 2, 4] if attention <= mamba else [2, 4]))
    mtp = draw(st.sampled_from([0, 3]))
    scheduler_block = max(attention * dcp, mamba)
    return Layout(
        attention_block=attention,
        mamba_block=mamba,
        dcp=dcp,
        mtp=mtp,
        budget=draw(st.sampled_from([128, 256])),
        num_blocks=draw(st.sampled_from([24, 32, 48, 80, 160])),
        mamba_groups=draw(st.sampled_from([1, 1, 2, 3])),
        open_pool=draw(st.sampled_from([0, 16])),
        retention_interval=draw(st.sampled_from([None, 0, 0, scheduler_block, 2 * scheduler_block])),
        block_drop=bool(mtp) and draw(st.booleans()),
        max_seqs=draw(st.sampled_from([4, 8])),
        max_model_len=1024,
        long_prefill_threshold=draw(st.sampled_from([0, 0, 0, 64, 16, 8])),
        scheduling=draw(st.sampled_from(["fcfs", "priority"])),
    )


def run_traffic(worker: Any, layout: Layout, asynchronous: bool, seed: int) -> None:
    """Arrivals with shared and branching prompts, answers one step late, aborts and cache resets, to the end."""
    rng = random.Random(seed)
    scheduler = worker.scheduler
    bases = [[rng.randrange(1000) for _ in range(600)] for _ in range(2)]
    longest = max(40, min(500, (layout.num_blocks - 10) * layout.attention_block * layout.dcp // 2))
    waiting = rng.randint(4, 16)
    answers: deque[Any] = deque()
    for _ in range(3000):
        while waiting and rng.random() < 0.5:
            length, base = rng.randint(1, longest), rng.choice(bases)
            shared = rng.choice([0, rng.randint(0, length), length, length])
            tokens = base[:shared] + [rng.randrange(1000, 2000) for _ in range(length - shared)]
            worker.add(f"r{waiting}", tokens, rng.choice([1, 1, 3, 12, 40]), rng.randint(0, 3))
            waiting -= 1
        if scheduler.requests and rng.random() < 0.05:
            scheduler.finish_requests(rng.choice(list(scheduler.requests)), RequestStatus.FINISHED_ABORTED)
        if rng.random() < 0.01:
            scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
        if not waiting and not scheduler.requests:
            break
        answers.append(worker.step())
        while len(answers) > asynchronous or (answers and rng.random() < 0.3):
            worker.deliver(answers.popleft())
    while answers:
        worker.deliver(answers.popleft())
    worker.check_all_returned()


@given(layouts(), st.booleans(), st.sampled_from(POLICIES), st.integers(0, 10_000))
@settings(derandomize=True, max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_traffic_corrupts_nothing(
    states: Any, layout: Layout, asynchronous: bool, policy: Any, seed: int
) -> None:
    worker = states.ShadowWorker(Engine.build(layout, "coalesced", policy, asynchronous), seed)
    run_traffic(worker, layout, asynchronous, seed)
    assert worker.aliased_copies == 0
    for _, plan in worker.plans:
        plan.check()


def free_exports_at_once(patch: pytest.MonkeyPatch) -> None:
    """Each request's export blocks go back before the next request of the step takes its own."""
    grant = CoalescingKVCacheManager.grant

    def eager(manager: CoalescingKVCacheManager, *args: Any) -> tuple[Any, list[KVCacheBlock]]:
        granted, blocks = grant(manager, *args)
        manager.block_pool.free_blocks(blocks)
        return granted, []

    patch.setattr(CoalescingKVCacheManager, "grant", eager)


def keep_unwritten_entries(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stock_guards, "withdraw_unwritten", lambda manager, request: None)


def plan_one_chunk_off(patch: pytest.MonkeyPatch) -> None:
    """A position is published under the hash of another."""
    publish = CoalescingKVCacheManager._publish

    def shifted(manager: CoalescingKVCacheManager, request: Any, mamba: Any, block: Any, state: Any) -> None:
        position = max(state.position - manager.grid.hit_alignment, manager.grid.hit_alignment)
        publish(manager, request, mamba, block, type(state)(position, state.protected))

    patch.setattr(CoalescingKVCacheManager, "_publish", shifted)


SMALL = Layout(attention_block=16, mamba_block=16, budget=256, num_blocks=48, max_seqs=8, max_model_len=1024)
PRIORITY = Layout(
    attention_block=16, mamba_block=16, budget=128, num_blocks=32, max_seqs=8, max_model_len=1024,
    long_prefill_threshold=64, scheduling="priority", retention_interval=None,
)  # fmt: skip


@pytest.mark.parametrize(
    "plant, layout",
    [
        (free_exports_at_once, SMALL),
        (keep_unwritten_entries, PRIORITY),
        (plan_one_chunk_off, SMALL),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_fault_is_found(plant: Any, layout: Layout, states: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(60):
        try:
            run_traffic(states.ShadowWorker(Engine.build(layout, policy="replay"), seed), layout, False, seed)
        except AssertionError:
            return
    pytest.fail("60 runs did not find the fault")
