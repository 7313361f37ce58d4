# SPDX-License-Identifier: Apache-2.0
"""Scheduler outputs that do not fit the worker: one clear error, and nothing is written."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from tests.invariants.checked_worker import CheckedWorker
from tests.traffic.world import Setting, World
from vllm.kda_prefill_variables import GATE
from vllm.v1.core.prefill_plan import HINT, PLANS_ATTRIBUTE, PlanMismatchError, PrefillPlan, plans_of
from vllm_kda_prefill.planning import Layout

LAYOUT = Layout(attention_block=32, mamba_block=32, budget=512, num_blocks=60, max_model_len=4096)


def memory(worker: CheckedWorker) -> list[bytes]:
    """Every bit of the KV cache and of what is known of it."""
    held = worker.prefixes
    arrays = (held.rows, held.states, held.windows, held.group)
    return [array.tobytes() for array in (worker.blocks._buffer.view(torch.int64).numpy(), *arrays)]


class Step:
    """A step with two prompts, scheduled and not run, and the worker's memory before it.

    Attributes:
        first: Id of the request that computes [0, 200).
        second: Id of the request that computes [0, 150).
    """

    def __init__(self, world: World) -> None:
        self.first, self.second = world.arrive(world.words(200)), world.arrive(world.words(150))
        self.output = world.server.schedule()
        self.worker = world.server.worker
        # Fresh blocks are zeroed before anything else, as the scheduler asks: whatever the plans say.
        for held in self.worker.memories:
            held.clear(self.output.new_block_ids_to_zero or [])
        self.before = memory(self.worker)

    @property
    def plans(self) -> dict[str, Any]:
        return getattr(self.output, PLANS_ATTRIBUTE)

    def edit(self, **changes: Any) -> None:
        """Change the first request's plan past its own checks, as what arrives from another process does."""
        plan = object.__new__(PrefillPlan)
        plan.__dict__.update(vars(self.plans[self.first]) | changes)
        self.plans[self.first] = pickle.loads(pickle.dumps(plan))

    def replace_block(self, block_id: Any) -> None:
        """Give the first request's shallowest state another block."""
        self.edit(block_ids={group: (block_id, *own[1:]) for group, own in self.plans[self.first].block_ids.items()})

    def refuse(self, match: str) -> None:
        with pytest.raises(PlanMismatchError, match=match) as refusal:
            self.worker.execute(self.output)
        assert str(refusal.value).endswith(HINT)
        assert "\n" not in str(refusal.value)
        assert memory(self.worker) == self.before


@pytest.fixture(params=["alone", "beside a decode"])
def step(request: pytest.FixtureRequest) -> Step:
    world = World(Setting(LAYOUT))
    if request.param != "alone":
        world.arrive(world.words(300), outputs=20)
        world.step()
    return Step(world)


def test_the_same_step_runs_with_its_own_plans(step):
    step.worker.execute(step.output)
    assert memory(step.worker) != step.before


def test_plan_of_a_missing_request(step):
    step.plans["gone"] = step.plans.pop(step.first)
    step.refuse("request gone for .*the step has no such request")


def test_swapped_plans(step):
    step.plans[step.first], step.plans[step.second] = step.plans[step.second], step.plans[step.first]
    step.refuse(rf"request {step.first} for \[0, 150\) .*the step computes 200 tokens")


def test_a_longer_span(step):
    step.edit(end=232)
    step.refuse(rf"request {step.first} for \[0, 232\) .*the step computes 200 tokens")


def test_a_later_span(step):
    step.edit(start=32, end=232, positions=(128, 160), block_ids={1: step.plans[step.first].block_ids[1][:2]})
    step.refuse(rf"request {step.first} for \[32, 232\) .*computes \[0, 200\) in 200 packed tokens")


@pytest.mark.parametrize("block_id", [60, 10**6, 2**40])
def test_block_past_the_cache(step, block_id):
    step.replace_block(block_id)
    step.refuse(rf"request {step.first} .*block {block_id} is not one of the blocks 1 to 59")


@pytest.mark.parametrize("block_id", [0, -1, True, 7.0, np.int64(7), "7", None, [7]])
def test_block_id_that_is_no_number_of_a_block(step, block_id):
    step.replace_block(block_id)
    step.refuse(
        rf"request {step.first}: KV cache group 1: block .*{str(block_id).strip('[]')}.* is not a block of its own"
    )


def test_block_of_another_plan(step):
    block_id = step.plans[step.second].block_ids[1][0]
    step.replace_block(block_id)
    step.refuse(f"block {block_id} is request {step.first}'s destination too")


@pytest.mark.parametrize(
    ("block_ids", "match"),
    [
        ({7: (40, 41)}, r"blocks for KV cache groups \[7\], the worker has \[1\]"),
        ({1: (40, 41), 2: (42, 43)}, r"blocks for KV cache groups \[1, 2\], the worker has \[1\]"),
        ({"1": (40, 41)}, r"KV cache groups to tuples of block ids, got '1': \(40, 41\)"),
        ({1: [40, 41]}, r"KV cache groups to tuples of block ids, got 1: \[40, 41\]"),
        ({1: None}, "KV cache groups to tuples of block ids, got 1: None"),
        ({1: (40,)}, "group 1 has 1 blocks for 2 checkpoint positions"),
        ({}, "at least one KV cache group, got {}"),
        (None, "at least one KV cache group, got None"),
    ],
)
def test_blocks_that_are_not_of_the_workers_groups(step, block_ids, match):
    step.edit(positions=(128, 160), block_ids=block_ids)
    step.refuse(rf"request {step.first}.*{match}")


def test_block_that_the_step_reads(step):
    new = {new.req_id: new for new in step.output.scheduled_new_reqs}
    block_id = new[step.second].block_ids[0][0]
    step.replace_block(block_id)
    with pytest.raises(AssertionError, match=f"exports go to blocks .{block_id}., which the same step reads or writes"):
        step.worker.execute(step.output)
    assert memory(step.worker) == step.before


@pytest.mark.parametrize(
    ("positions", "match"),
    [
        ((128.0, 160), r"plain integers, got \(0, 200, 128\.0, 160\)"),
        ((np.int64(128), 160), r"plain integers, got \(0, 200, np\.int64\(128\), 160\)"),
        ((True, 160), r"plain integers, got \(0, 200, True, 160\)"),
        (("128", 160), r"plain integers, got \(0, 200, '128', 160\)"),
        ((None, 160), r"plain integers, got \(0, 200, None, 160\)"),
        ([128, 160], r"positions are a tuple, got \[128, 160\]"),
        (None, "positions are a tuple, got None"),
        ((), r"1 to 4 checkpoints, got 0: \(\)"),
        ((32, 64, 96, 128, 160), "1 to 4 checkpoints, got 5"),
        ((120, 160), "position 120 is not a multiple of 16"),
        ((0, 160), r"position 0 is not inside the query span \[0, 200\)"),
        ((160, 200), r"position 200 is not inside the query span \[0, 200\)"),
        ((160, 128), r"sorted and unique, got \(160, 128\)"),
        ((160, 160), r"sorted and unique, got \(160, 160\)"),
    ],
)
def test_positions_that_no_plan_takes(step, positions, match):
    step.edit(positions=positions, block_ids={1: (40, 41)})
    step.refuse(rf"request {step.first}: .*{match}")
    with pytest.raises(ValueError, match=match):
        PrefillPlan(0, 200, positions, {1: (40, 41)})


@pytest.mark.parametrize(("start", "end"), [("0", 200), (0, 200.0), (None, 200), (False, 200), (-16, 184), (200, 0)])
def test_spans_that_no_plan_takes(step, start, end):
    step.edit(start=start, end=end)
    step.refuse(rf"request {step.first}: .*(plain integers|is empty or starts below 0)")


@pytest.mark.parametrize("plan", [None, {}, (0, 200, (128,)), "plan"])
def test_something_else_than_a_plan(step, plan):
    step.plans[step.first] = plan
    step.refuse(f"request {step.first} is .*, not a PrefillPlan")


def test_something_else_than_plans(step):
    setattr(step.output, PLANS_ATTRIBUTE, [(step.first, step.plans[step.first])])
    step.refuse("plans are .*, not a dict of plans")


def test_output_of_a_scheduler_without_the_gate():
    world = World(Setting(LAYOUT, arm="stock"))
    world.arrive(world.words(100))
    output = world.server.schedule()
    assert not hasattr(output, PLANS_ATTRIBUTE)
    with pytest.raises(PlanMismatchError, match=f"without this fork's scheduler; set {GATE}"):
        plans_of(output)
