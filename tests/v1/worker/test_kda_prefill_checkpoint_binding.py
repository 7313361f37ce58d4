# SPDX-License-Identifier: Apache-2.0
"""Plans of a scheduler output become rows of the worker's batch, or the step fails."""

import pickle

import msgspec
import numpy as np
import pytest

from vllm.kda_prefill_variables import GATE
from vllm.v1.attention.backends.checkpoint_rows import NOTHING, bind_rows
from vllm.v1.core.prefill_plan import PLANS_ATTRIBUTE, PlanMismatchError, PrefillPlan, plans_of
from vllm.v1.core.sched.output import SchedulerOutput

GROUPS = (1, 2)
PLAN = PrefillPlan(512, 8704, (4608, 6656, 7680, 8192), {1: (10, 11, 12, 13), 2: (20, 21, 22, 23)})
SHORT = PrefillPlan(0, 1024, (512,), {1: (30,), 2: (31,)})


def bind(plans, **changes):
    """Bind into a batch of a decode, a long prefill, a draft-verify row and a short prefill."""
    batch = {
        "request_ids": ["decode", "long", "verify", "short"],
        "num_computed_tokens": np.array([100, 512, 900, 0]),
        "num_scheduled_tokens": np.array([1, 8192, 4, 1024]),
        "query_start_loc": np.array([0, 1, 8193, 8197, 9221]),
        "group_ids": GROUPS,
        "num_blocks": 100,
    }
    return bind_rows(plans, **{**batch, **changes})


def test_rows_follow_the_packed_request_order():
    rows = bind({"short": SHORT, "long": PLAN})
    assert rows.offsets.dtype == np.int32
    assert rows.offsets.tolist() == [[0] * 4, [4096, 6144, 7168, 7680], [0] * 4, [512, 0, 0, 0]]
    assert rows.block_ids[1].tolist() == [[0] * 4, [10, 11, 12, 13], [0] * 4, [30, 0, 0, 0]]
    assert rows.block_ids[2].tolist() == [[0] * 4, [20, 21, 22, 23], [0] * 4, [31, 0, 0, 0]]


def test_a_batch_without_plans_has_no_rows():
    assert bind({}) is NOTHING


def test_a_plan_for_a_missing_request_is_refused():
    with pytest.raises(PlanMismatchError, match=r"request gone .*the batch has no such request"):
        bind({"gone": SHORT})


def test_swapped_rows_are_refused_and_both_sides_named():
    with pytest.raises(PlanMismatchError, match=r"request long for \[0, 1024\).*row 1 computes \[512, 8704\)"):
        bind({"long": SHORT, "short": PLAN})


@pytest.mark.parametrize(
    "changes",
    [
        {"num_computed_tokens": np.array([100, 0, 900, 0])},
        {"num_scheduled_tokens": np.array([1, 8191, 4, 1024])},
        {"query_start_loc": np.array([0, 1, 8192, 8196, 9220])},
    ],
    ids=["computed", "scheduled", "packed"],
)
def test_a_span_other_than_the_workers_own_is_refused(changes):
    with pytest.raises(PlanMismatchError, match="request long"):
        bind({"long": PLAN}, **changes)


def test_blocks_for_other_groups_are_refused():
    with pytest.raises(PlanMismatchError, match=r"groups \[1, 2\], the worker has \[1\]"):
        bind({"long": PLAN}, group_ids=(1,))


def test_a_block_outside_the_cache_is_refused():
    with pytest.raises(PlanMismatchError, match="block 23 is not one of the blocks 1 to 22"):
        bind({"long": PLAN}, num_blocks=23)


def test_a_block_of_two_requests_is_refused():
    aliased = PrefillPlan(0, 1024, (512,), {1: (12,), 2: (31,)})
    with pytest.raises(PlanMismatchError, match="block 12 is request long's destination too"):
        bind({"long": PLAN, "short": aliased})


def test_a_batch_that_names_a_request_twice_is_refused():
    with pytest.raises(PlanMismatchError, match="names a request twice"):
        bind({"long": PLAN}, request_ids=["decode", "long", "long", "short"])


def test_an_output_from_an_engine_without_the_gate_is_refused():
    with pytest.raises(PlanMismatchError, match=f"{GATE} alike in every process"):
        plans_of(SchedulerOutput.make_empty())


def test_plans_survive_the_way_to_a_worker_process():
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens["long"] = 8192
    setattr(output, PLANS_ATTRIBUTE, {"long": PLAN})
    assert plans_of(pickle.loads(pickle.dumps(output))) == {"long": PLAN}
    encoded = msgspec.msgpack.encode({"long": PLAN})
    assert msgspec.msgpack.decode(encoded, type=dict[str, PrefillPlan]) == {"long": PLAN}


@pytest.mark.parametrize(
    ("block_ids", "message"),
    [
        ({}, "at least one KV cache group"),
        ({1: (10,)}, "1 blocks for 4 checkpoint positions"),
        ({1: (10, 11, 12, 0)}, "block 0 is not a block of its own"),
        ({1: (10, 11, 12, 10)}, "block 10 is not a block of its own"),
        ({1: (10, 11, 12, 13), 2: (20, 21, 22, 13)}, "block 13 is not a block of its own"),
        ({1: (10, 11, 12, 13.0)}, r"block 13\.0 is not a block of its own"),
    ],
)
def test_a_plan_owns_a_block_of_every_group_for_each_position(block_ids, message):
    with pytest.raises(ValueError, match=message):
        PrefillPlan(512, 8704, (4608, 6656, 7680, 8192), block_ids)
