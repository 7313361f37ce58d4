# SPDX-License-Identifier: Apache-2.0
"""Each shared check finds the fault that it is there for, under both executing workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.invariants.access import StepAccess, check_copies
from tests.invariants.pool import check_pool
from tests.traffic.world import Setting, World
from tests.v1.core.shadow_worker import ShadowWorker
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.tiered_free_queue import Tier
from vllm_kda_prefill.planning import Engine, Layout

LAYOUT = Layout(attention_block=32, mamba_block=32, budget=512, num_blocks=60, max_model_len=4096)


def toy() -> World:
    world = World(Setting(LAYOUT))
    world.arrive(world.words(200))
    world.arrive(world.words(150))
    return world


def labels() -> ShadowWorker:
    worker = ShadowWorker(Engine.build(LAYOUT), checked=False)
    worker.add("r0", list(range(200)))
    worker.add("r1", list(range(1000, 1150)))
    return worker


def execute(worker: World | ShadowWorker, output: SchedulerOutput) -> Any:
    return worker._execute(output) if isinstance(worker, ShadowWorker) else worker.server.worker.execute(output)


@pytest.mark.parametrize("make", [toy, labels])
def test_two_requests_that_write_one_running_block(make: Any) -> None:
    worker = make()
    output = worker.scheduler.schedule()
    first, second = output.scheduled_new_reqs
    second.block_ids[1][(150 - 1) // 32] = first.block_ids[1][(200 - 1) // 32]
    with pytest.raises(AssertionError, match=r"is written by requests r[01] and r[01] in one step"):
        execute(worker, output)


@pytest.mark.parametrize("make", [toy, labels])
def test_two_requests_that_write_one_attention_block(make: Any) -> None:
    worker = make()
    output = worker.scheduler.schedule()
    first, second = output.scheduled_new_reqs
    second.block_ids[0][0] = first.block_ids[0][0]
    with pytest.raises(AssertionError, match=r"is written by requests r[01] and r[01] in one step"):
        execute(worker, output)


@pytest.mark.parametrize("make", [toy, labels])
def test_copies_that_depend_on_their_order(make: Any) -> None:
    worker = make()
    output = worker.scheduler.schedule()
    output.kv_cache_block_copies = [SimpleNamespace(src_block_id=a, dst_block_id=b) for a, b in ((40, 41), (41, 42))]
    with pytest.raises(AssertionError, match="copies depend on each other's order"):
        execute(worker, output)


def test_two_copies_into_one_block() -> None:
    copies = [SimpleNamespace(src_block_id=source, dst_block_id=9) for source in (1, 2)]
    with pytest.raises(AssertionError, match="two copies have one target"):
        check_copies(copies)


@pytest.mark.parametrize("also_read", [(), ("b",)])
def test_a_state_that_another_request_overwrites(also_read: tuple[str, ...]) -> None:
    access = StepAccess()
    for reader in ("a", *also_read):
        access.read(7, reader)
    access.write(7, "b")
    with pytest.raises(AssertionError, match=r"block 7: requests \['a'\] read what b overwrites"):
        access.check()


def served() -> World:
    """A world whose free blocks hold entries of both classes."""
    world = World(Setting(LAYOUT))
    world.arrive(world.words(500))
    world.drain()
    check_pool(world.scheduler)
    return world


def test_a_probationary_block_without_its_mark() -> None:
    world = served()
    queue = world.scheduler.kv_cache_manager.block_pool.free_block_queue
    block_id = next(block_id for block_id, tier in enumerate(queue._tier) if tier == Tier.PROBATIONARY)
    queue._probationary.remove(block_id)
    with pytest.raises(AssertionError, match=f"block {block_id} is on the probationary list unmarked"):
        world.step()


def test_an_entry_on_the_empty_list() -> None:
    world = served()
    queue = world.scheduler.kv_cache_manager.block_pool.free_block_queue
    block_id = next(block_id for block_id, tier in enumerate(queue._tier) if tier == Tier.PROTECTED)
    queue._tier[block_id] = Tier.EMPTY
    with pytest.raises(AssertionError, match=f"block {block_id} holds an entry, on the empty list"):
        world.step()


def test_a_block_in_two_groups() -> None:
    world = toy()
    world.schedule()
    attention, mamba = world.scheduler.kv_cache_manager.coordinator.single_type_managers
    block = attention.req_to_blocks["r0"][0]
    mamba.req_to_blocks["r1"][0] = block
    block.ref_cnt += 1
    with pytest.raises(AssertionError, match=f"block {block.block_id} is in two KV cache groups"):
        check_pool(world.scheduler)
