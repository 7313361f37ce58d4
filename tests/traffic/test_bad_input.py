"""Scheduler outputs that do not fit the worker: one clear error, and nothing is written."""

from __future__ import annotations

import dataclasses

import pytest

from tests.traffic.world import Setting, World
from vllm.v1.core.recurrent_prefill_checkpoint import PLANS_ATTRIBUTE, BoundPlan
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.prefill_plan_rows import PlanMismatchError, plans_of
from vllm_kda_prefill.planning import Layout

LAYOUT = Layout(attention_block=32, mamba_block=32, budget=512, num_pages=60, max_model_len=4096)


@pytest.fixture
def scheduled() -> tuple[World, SchedulerOutput]:
    """Two prompts in one step, scheduled and not run."""
    world = World(Setting(LAYOUT))
    world.arrive(world.words(200))
    world.arrive(world.words(150))
    return world, world.server.schedule()


def untouched(world: World) -> bool:
    return not world.server.worker.pages.state_shadow.any() and not world.server.worker.pages.row_shadow.any()


def refuse(world: World, output: SchedulerOutput, match: str) -> None:
    with pytest.raises((PlanMismatchError, ValueError), match=match):
        world.server.worker.execute(output)
    assert untouched(world)


def test_the_same_step_runs_with_its_own_plans(scheduled):
    world, output = scheduled
    world.server.worker.execute(output)
    assert not untouched(world)


def test_plan_of_a_missing_request(scheduled):
    world, output = scheduled
    plans = plans_of(output)
    plans["gone"] = plans.pop("r0")
    refuse(world, output, "request gone .* no such request")


def test_swapped_plans(scheduled):
    world, output = scheduled
    plans = plans_of(output)
    plans["r0"], plans["r1"] = plans["r1"], plans["r0"]
    refuse(world, output, r"request r\d for \[0, \d+\) .* computes \[0, \d+\)")


def test_another_span(scheduled):
    world, output = scheduled
    plans = plans_of(output)
    plans["r0"] = dataclasses.replace(plans["r0"], end=232)
    refuse(world, output, r"request r0 for \[0, 232\)")


@pytest.mark.parametrize("page", [60, 10**6])
def test_page_out_of_range(scheduled, page):
    world, output = scheduled
    plan = plans_of(output)["r0"]
    pages = {group: (page, *pages[1:]) for group, pages in plan.pages.items()}
    plans_of(output)["r0"] = dataclasses.replace(plan, pages=pages)
    refuse(world, output, f"page {page} is not one of the pages 1 to 59")


def test_page_of_another_plan(scheduled):
    world, output = scheduled
    plans = plans_of(output)
    stolen = {group: (plans["r1"].pages[group][0], *pages[1:]) for group, pages in plans["r0"].pages.items()}
    plans["r0"] = dataclasses.replace(plans["r0"], pages=stolen)
    refuse(world, output, "destination too")


def test_pages_of_a_group_that_is_not_there(scheduled):
    world, output = scheduled
    plan = plans_of(output)["r0"]
    plans_of(output)["r0"] = dataclasses.replace(plan, pages={7: plan.pages[1]})
    refuse(world, output, r"pages for KV cache groups \[7\], the worker has \[1\]")


def test_page_that_the_step_reads(scheduled):
    world, output = scheduled
    plan = plans_of(output)["r0"]
    used = output.scheduled_new_reqs[1].block_ids[0][0]
    pages = {group: (used, *pages[1:]) for group, pages in plan.pages.items()}
    plans_of(output)["r0"] = dataclasses.replace(plan, pages=pages)
    with pytest.raises(AssertionError, match=f"exports go to pages .{used}., which the same step reads or writes"):
        world.server.worker.execute(output)
    assert untouched(world)


@pytest.mark.parametrize(
    ("positions", "match"),
    [((32.0,), "plain integers"), ((40,), "multiple of 16"), ((0,), "not inside"), ((64, 32), "sorted and unique")],
)
def test_positions_that_no_plan_takes(positions, match):
    with pytest.raises(ValueError, match=match):
        BoundPlan(0, 200, positions, {1: tuple(range(1, len(positions) + 1))})


def test_output_of_a_scheduler_without_the_gate():
    world = World(Setting(LAYOUT, arm="stock"))
    world.arrive(world.words(100))
    output = world.server.schedule()
    assert not hasattr(output, PLANS_ATTRIBUTE)
    with pytest.raises(PlanMismatchError, match="without this fork's scheduler"):
        plans_of(output)
