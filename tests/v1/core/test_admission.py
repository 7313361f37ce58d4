# SPDX-License-Identifier: Apache-2.0
"""The feature never makes a request wait, be preempted or be refused where stock would run it."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from vllm.v1.core.coalescing_kv_cache_manager import CoalescingKVCacheManager
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_kda_prefill.planning import Arm, Engine, Layout

BLOCK = 16


def random_layout(rng: random.Random) -> Layout:
    return Layout(
        attention_block=BLOCK,
        mamba_block=BLOCK,
        dcp=rng.choice([1, 2, 4]),
        mtp=rng.choice([0, 3]),
        budget=rng.choice([128, 256]),
        num_blocks=rng.choice([24, 30, 40, 60]),
        mamba_groups=rng.choice([1, 2]),
        retention_interval=rng.choice([0, None]),
        scheduling=rng.choice(["fcfs", "priority"]),
        max_model_len=1024,
    )


def longest_prompt(layout: Layout) -> int:
    return max(40, min(400, (layout.num_blocks - 12) * BLOCK * layout.dcp // 2))


def steps(arm: Arm, seed: int, states: Any) -> list[tuple[dict[str, int], set[str]]]:
    """Scheduled tokens and preempted requests of every step, prompts unique and the prefix cache not read."""
    rng = random.Random(seed)
    layout = random_layout(rng)
    worker = states.ShadowWorker(Engine.build(layout, arm), checked=False)
    taken, waiting = [], 20
    while waiting or worker.scheduler.requests:
        while waiting and rng.random() < 0.4:
            tokens = [rng.randrange(50_000) for _ in range(rng.randint(1, longest_prompt(layout)))]
            request = worker.add(f"r{waiting}", tokens, rng.choice([1, 5, 40, 120]), rng.randint(0, 3))
            request.skip_reading_prefix_cache = True
            waiting -= 1
        answer = worker.step()
        taken.append((dict(answer.output.num_scheduled_tokens), answer.output.preempted_req_ids or set()))
        worker.deliver(answer)
    return taken


def test_without_sharing_every_step_is_stocks(states: Any) -> None:
    """The same requests with the same token counts, and the same preemptions.

    A chunk may run on where stock stops for nothing but the prompt's tail; traffic that has no such chunk is
    compared, and that is most.
    """
    preempted = compared = 0
    for seed in range(16):
        stock, coalesced = steps("stock", seed, states), steps("coalesced", seed, states)
        if stock != coalesced:
            first = next(step for step in zip(stock, coalesced, strict=False) if step[0] != step[1])
            assert any(count > first[0][0].get(name, 0) for name, count in first[1][0].items()), (seed, first)
            assert first[1][1] <= first[0][1], (seed, first)
            continue
        compared += 1
        preempted += sum(len(names) for _, names in stock)
    assert compared >= 10
    assert preempted > 20


def stock_twin(scheduler: Scheduler) -> Scheduler:
    """Stock's scheduler in the same state: blocks, entries, free list, requests."""
    shared = [
        scheduler.vllm_config,
        scheduler.kv_cache_config,
        scheduler.structured_output_manager,
        scheduler.kv_event_publisher,
        scheduler.encoder_cache_manager,
        scheduler.retention,  # type: ignore[attr-defined]
        *(request.sampling_params for request in scheduler.requests.values()),
    ]
    twin = copy.deepcopy(scheduler, {id(thing): thing for thing in shared})
    twin.__class__ = AsyncScheduler if isinstance(scheduler, AsyncScheduler) else Scheduler
    twin.kv_cache_manager.__class__ = KVCacheManager
    twin.cache_config = scheduler.vllm_config.cache_config
    return twin


def paired_steps(seed: int, states: Any) -> Iterator[tuple[Layout, SchedulerOutput, SchedulerOutput]]:
    """Each step of random traffic with shared and branching prompts, and what stock would do in its place."""
    rng = random.Random(seed)
    layout, asynchronous = random_layout(rng), rng.random() < 0.5
    worker = states.ShadowWorker(Engine.build(layout, asynchronous=asynchronous), seed, checked=False)
    base = [rng.randrange(50_000) for _ in range(500)]
    answers: deque[Any] = deque()
    waiting = 14
    while waiting or worker.scheduler.requests:
        while waiting and rng.random() < 0.3:
            length = rng.randint(1, longest_prompt(layout))
            shared = rng.choice([0, length, rng.randint(0, length)])
            tokens = base[:shared] + [rng.randrange(50_000) for _ in range(length - shared)]
            worker.add(f"r{waiting}", tokens, rng.choice([1, 5, 40, 120]), rng.randint(0, 3))
            waiting -= 1
        stock = stock_twin(worker.scheduler).schedule()
        answers.append(worker.step())
        yield layout, stock, answers[-1].output
        while len(answers) > asynchronous:
            worker.deliver(answers.popleft())


@pytest.fixture
def _deep_recursion() -> Iterator[None]:
    """Copying a free list follows its links."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("_deep_recursion")
def test_from_the_same_state_nobody_is_worse_off_than_stock(states: Any) -> None:
    """Nobody is preempted whom stock keeps, and only a longer chunk before them makes others wait a step.

    A chunk that runs on where stock stops takes tokens that stock would give to the next; nobody is left out for
    want of blocks.
    """
    longer_chunks = count = 0
    for seed in (0, 1, 2, 15, 20, 30):  # The last three preempt where spans are not checked for room.
        for layout, stock, ours in paired_steps(seed, states):
            count += 1
            assert (ours.preempted_req_ids or set()) <= (stock.preempted_req_ids or set())
            theirs, mine = dict(stock.num_scheduled_tokens), ours.num_scheduled_tokens
            # A prompt of one token runs without stock's placeholder drafts.
            theirs |= {new.req_id: 1 for new in stock.scheduled_new_reqs if len(new.prefill_token_ids or ()) == 1}
            if mine == theirs:
                continue
            longer = [name for name, tokens in mine.items() if tokens > theirs.get(name, 0)]
            assert longer
            longer_chunks += 1
            if theirs.keys() - mine.keys():
                assert layout.budget - sum(mine.values()) < BLOCK
    assert count > 800
    assert longer_chunks > 3


def preempted_by_a_long_prompt(arm: Arm, num_blocks: int, num_short: int) -> set[str]:
    """Who is preempted while short requests decode beside a prompt that leaves a cached one at 400 of 600 tokens."""
    layout = Layout(attention_block=BLOCK, mamba_block=BLOCK, budget=128, long_prefill_threshold=96, max_model_len=1024)
    engine = Engine.build(dataclasses.replace(layout, num_blocks=num_blocks), arm)
    scheduler = engine.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    shared = list(range(600))
    engine.add("first", shared)
    while scheduler.requests:
        engine.step()
    states = {b.block_id for b in pool.blocks if b.block_hash is not None and get_group_id(b.block_hash) > 0}
    pool.evict_blocks(states)  # What is left is attention's: a junction, and no state to resume from.
    engine.add("long", shared[:400] + list(range(5000, 5200)))
    engine.step()
    preempted: set[str] = set()
    for step in itertools.count(1):
        if not scheduler.requests:
            return preempted
        for index in range(2 * step - 2, min(2 * step, num_short)):
            first = 10_000 + 100 * index
            engine.add(f"short{index}", list(range(first, first + 12 + step)), max_tokens=6)
        preempted |= engine.step().preempted_req_ids or set()
    raise AssertionError


@pytest.mark.parametrize("num_short", [2, 4])
def test_decoding_requests_keep_the_blocks_they_grow_into(num_short: int) -> None:
    """A span that runs on holds its blocks a step earlier; whoever decodes meanwhile still finds the next one."""
    for num_blocks in range(46, 62):
        stock, ours = (preempted_by_a_long_prompt(arm, num_blocks, num_short) for arm in ("stock", "coalesced"))
        assert ours <= stock, num_blocks


def cached_of_a_branch(dcp: int, num_free: int) -> int | None:
    """Cached tokens of a prompt that leaves another one inside an attention block, with so many free blocks in the
    pool; None if it has to wait."""
    layout = Layout(attention_block=BLOCK, mamba_block=BLOCK, dcp=dcp, budget=512, num_blocks=40, max_model_len=1024)
    engine = Engine.build(layout)
    scheduler, pool = engine.scheduler, engine.scheduler.kv_cache_manager.block_pool
    prompt = list(range(6 * BLOCK * dcp))
    engine.add("first", prompt)
    while scheduler.requests:
        engine.step()
    # Blocks without an entry go first, so the cache keeps what the branch hits.
    pool.get_new_blocks(pool.get_num_free_blocks() - num_free)
    leaves = scheduler.retention.grid.tail(len(prompt)) + 4
    engine.add("branch", prompt[:leaves] + list(range(9000, 9000 + 3 * BLOCK)))
    new = engine.step().scheduled_new_reqs
    return new[0].num_computed_tokens if new else None


@pytest.mark.parametrize("dcp", [2, 4])
def test_nobody_waits_for_the_block_of_a_copy(dcp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit inside an attention block takes one block more than a hit at its beginning, until it is copied.

    Where that one is lacking, the request resumes less deep, in the same step.
    """
    frees = range(8, 24)
    ours = [cached_of_a_branch(dcp, num_free) for num_free in frees]
    monkeypatch.setattr(CoalescingKVCacheManager, "get_computed_blocks", KVCacheManager.get_computed_blocks)
    copying = [cached_of_a_branch(dcp, num_free) for num_free in frees]
    print(ours, copying)
    spared = [index for index, cached in enumerate(copying) if cached is None and ours[index] is not None]
    assert len(spared) == 1
    assert ours[spared[0]] < ours[spared[0] + 1]  # type: ignore[operator]
    assert [cached for index, cached in enumerate(ours) if index != spared[0]] == [
        cached for index, cached in enumerate(copying) if index != spared[0]
    ]
