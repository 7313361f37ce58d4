# SPDX-License-Identifier: Apache-2.0
"""Turn the plans of a scheduler output into rows of the worker's packed batch, or refuse.

Nothing is derived here a second time: a plan that does not fit the worker's own idea of the step is an error,
since a state written to the wrong page is served later as a fluent wrong answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.v1.core.recurrent_prefill_checkpoint import MAX_CHECKPOINTS, PLANS_ATTRIBUTE, BoundPlan
from vllm.v1.core.sched.output import SchedulerOutput

Int32Rows = npt.NDArray[np.int32]


WAY_OUT = (
    "the step was not run; run the same version of this fork with the same settings in every process of the engine, "
    "and report this line if that is so"
)


class PlanMismatchError(RuntimeError):
    """A plan and the worker's own batch disagree.

    Args:
        problem: What differs, with the values of both sides.
        way_out: What to do about it.
    """

    def __init__(self, problem: str, way_out: str = WAY_OUT) -> None:
        super().__init__(problem, way_out)

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


@dataclass(frozen=True)
class CheckpointRows:
    """What each request of a packed batch exports.

    Attributes:
        offsets: int32 `[num_reqs, 4]`, tokens after the row's query start, ascending; 0 where inactive.
        slots: KV cache group id -> int32 `[num_reqs, 4]`, destination pages; 0 where inactive.
    """

    offsets: Int32Rows
    slots: Mapping[int, Int32Rows]


def plans_of(scheduler_output: SchedulerOutput) -> dict[str, BoundPlan]:
    """The plans of a scheduler output, each in itself and with what the step schedules in order.

    Call it before the step does anything.

    Raises:
        PlanMismatchError: The output has none, not even an empty set: a scheduler without the gate made it. Or a
            plan breaks the rules of `BoundPlan`, or is not for as many tokens as its request is scheduled for.
    """
    plans = getattr(scheduler_output, PLANS_ATTRIBUTE, None)
    if plans is None:
        raise PlanMismatchError(
            "the scheduler output carries no KDA prefill plans: the engine core runs without this fork's scheduler",
            "set VLLM_B12X_KDA_PREFILL_COALESCING alike in every process",
        )
    if not isinstance(plans, dict):
        raise PlanMismatchError(f"the scheduler output's KDA prefill plans are {plans!r}, not a dict of plans")
    for request_id, plan in plans.items():
        _check_plan(request_id, plan, scheduler_output.num_scheduled_tokens)
    return plans


def _check_plan(request_id: str, plan: BoundPlan, num_scheduled_tokens: Mapping[str, int]) -> None:
    if not isinstance(plan, BoundPlan):
        raise PlanMismatchError(f"KDA prefill plan of request {request_id} is {plan!r}, not a BoundPlan")
    try:
        plan.check()
    except ValueError as error:
        raise PlanMismatchError(f"KDA prefill plan of request {request_id}: {error}") from None
    scheduled = num_scheduled_tokens.get(request_id)
    if scheduled is None:
        raise PlanMismatchError(f"{_name(request_id, plan)}: the step has no such request")
    if scheduled != plan.end - plan.start:
        raise PlanMismatchError(f"{_name(request_id, plan)}: the step computes {scheduled} tokens of the request")


def bind_rows(
    plans: Mapping[str, BoundPlan],
    *,
    request_ids: Sequence[str],
    num_computed_tokens: Sequence[int] | npt.NDArray[Any],
    num_scheduled_tokens: Sequence[int] | npt.NDArray[Any],
    query_start_loc: Sequence[int] | npt.NDArray[Any],
    group_ids: Collection[int],
    num_pages: int,
) -> CheckpointRows | None:
    """Lay out plans in packed request order and check each against its row.

    Args:
        plans: Request id -> plan, as `plans_of` checked them.
        request_ids: Requests of the batch, in row order.
        num_computed_tokens: Tokens computed before this step, a row each.
        num_scheduled_tokens: Tokens of this step, a row each.
        query_start_loc: First token of each row in the packed batch, and the total.
        group_ids: The worker's Mamba KV cache groups.
        num_pages: Pages of the KV cache.

    Returns:
        The rows, or None where the batch exports nothing.

    Raises:
        PlanMismatchError: A plan names a request that is not in the batch, another query span, other KV cache
            groups, or a page that is out of range or another plan's. The message names both sides.
    """
    if not plans:
        return None
    rows = {request_id: row for row, request_id in enumerate(request_ids)}
    if len(rows) != len(request_ids):
        raise PlanMismatchError(f"the batch names a request twice: {list(request_ids)}")
    offsets = np.zeros((len(request_ids), MAX_CHECKPOINTS), np.int32)
    slots = {group: np.zeros_like(offsets) for group in group_ids}
    owners: dict[int, str] = {}
    for request_id, plan in plans.items():
        row = rows.get(request_id)
        if row is None:
            raise PlanMismatchError(f"{_name(request_id, plan)}: the batch has no such request")
        start = int(num_computed_tokens[row])
        span = (start, start + int(num_scheduled_tokens[row]))
        length = int(query_start_loc[row + 1]) - int(query_start_loc[row])
        if span != (plan.start, plan.end) or length != plan.end - plan.start:
            raise PlanMismatchError(
                f"{_name(request_id, plan)}: its row {row} computes [{span[0]}, {span[1]}) in {length} packed tokens"
            )
        if set(plan.pages) != set(group_ids):
            raise PlanMismatchError(
                f"{_name(request_id, plan)}: pages for KV cache groups {sorted(plan.pages)}, "
                f"the worker has {sorted(group_ids)}"
            )
        count = len(plan.positions)
        offsets[row, :count] = plan.offsets
        for group, pages in plan.pages.items():
            for page in pages:
                if not 0 < page < num_pages:
                    raise PlanMismatchError(
                        f"{_name(request_id, plan)}: page {page} is not one of the pages 1 to {num_pages - 1}"
                    )
                if page in owners:
                    raise PlanMismatchError(
                        f"{_name(request_id, plan)}: page {page} is request {owners[page]}'s destination too"
                    )
                owners[page] = request_id
            slots[group][row, :count] = pages
    return CheckpointRows(offsets, slots)


def _name(request_id: str, plan: BoundPlan) -> str:
    return f"KDA prefill plan of request {request_id} for [{plan.start}, {plan.end}) at {list(plan.positions)}"
