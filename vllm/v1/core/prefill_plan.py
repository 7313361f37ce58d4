# SPDX-License-Identifier: Apache-2.0
"""The plan that travels from the scheduler to the workers: its type, its check, and a log of the first few.

No torch: the scheduler makes plans, and every worker reads them from the scheduler's output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import vllm.envs as envs
from vllm.kda_prefill_variables import GATE
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger(__name__)

CHECKPOINT_ALIGNMENT = 16
"""Tokens between two places where the KDA prefill kernels can emit a state; stock's `prefill_checkpoint_alignment`."""

MAX_CHECKPOINTS = 4
"""States one query can export besides its final one."""

PLANS_ATTRIBUTE = "kda_prefill_plans"
"""Where a scheduler output carries its plans: request id -> `PrefillPlan`, exporting requests only."""

HINT = (
    "the step was not run; run the same version of this fork with the same settings in every process of the engine, "
    "and report this line if that is so"
)


@dataclass(frozen=True)
class PrefillPlan:
    """The states that the query span `[start, end)` exports while it is computed, and where each goes.

    Attributes:
        start: First token of the query span.
        end: One past its last token.
        positions: One to four sorted unique token counts strictly inside the span, each a multiple of
            `CHECKPOINT_ALIGNMENT` tokens after `start`.
        block_ids: KV cache group id -> block id of each position, in the order of `positions`, for every Mamba
            group. Block 0 is vLLM's null block and never a destination; no block appears twice.

    Raises:
        ValueError: The plan breaks one of these rules; the message names the value.
    """

    start: int
    end: int
    positions: tuple[int, ...]
    block_ids: Mapping[int, tuple[int, ...]]

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check the rules above, also for a plan that another process sent: unpickling does not.

        Raises:
            ValueError: As for the class.
        """
        self._check_positions()
        self._check_block_ids()

    def _check_positions(self) -> None:
        if not isinstance(self.positions, tuple):
            raise ValueError(f"checkpoint positions are a tuple, got {self.positions!r}")
        values = (self.start, self.end, *self.positions)
        if any(type(value) is not int for value in values):
            raise ValueError(f"a prefill plan holds plain integers, got {values}")
        if not 0 <= self.start < self.end:
            raise ValueError(f"query span [{self.start}, {self.end}) is empty or starts below 0")
        if not 1 <= len(self.positions) <= MAX_CHECKPOINTS:
            raise ValueError(
                f"a query exports 1 to {MAX_CHECKPOINTS} checkpoints, got {len(self.positions)}: {self.positions}"
            )
        if any(low >= high for low, high in zip(self.positions, self.positions[1:], strict=False)):
            raise ValueError(f"checkpoint positions must be sorted and unique, got {self.positions}")
        for position in self.positions:
            if not self.start < position < self.end:
                raise ValueError(
                    f"checkpoint position {position} is not inside the query span [{self.start}, {self.end})"
                )
            if (position - self.start) % CHECKPOINT_ALIGNMENT:
                raise ValueError(
                    f"checkpoint position {position} is not a multiple of {CHECKPOINT_ALIGNMENT} tokens "
                    f"after the query start {self.start}"
                )

    def _check_block_ids(self) -> None:
        if not isinstance(self.block_ids, Mapping) or not self.block_ids:
            raise ValueError(f"a prefill plan needs the blocks of at least one KV cache group, got {self.block_ids!r}")
        seen: set[int] = set()
        for group, block_ids in self.block_ids.items():
            if type(group) is not int or not isinstance(block_ids, tuple):
                raise ValueError(
                    f"a prefill plan maps KV cache groups to tuples of block ids, got {group!r}: {block_ids!r}"
                )
            if len(block_ids) != len(self.positions):
                raise ValueError(
                    f"KV cache group {group} has {len(block_ids)} blocks for {len(self.positions)} checkpoint positions"
                )
            for block_id in block_ids:
                if type(block_id) is not int or block_id <= 0 or block_id in seen:
                    raise ValueError(f"KV cache group {group}: block {block_id!r} is not a block of its own")
                seen.add(block_id)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Positions relative to the query start."""
        return tuple(position - self.start for position in self.positions)

    def named(self, request_id: str) -> str:
        """The plan as messages name it."""
        return f"KDA prefill plan of request {request_id} for [{self.start}, {self.end}) at {list(self.positions)}"


class PlanMismatchError(RuntimeError):
    """A plan and the worker's own batch disagree.

    Args:
        problem: What differs, with the values of both sides.
        hint: What to do about it.
    """

    def __init__(self, problem: str, hint: str = HINT) -> None:
        super().__init__(problem, hint)

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


def plans_of(scheduler_output: SchedulerOutput) -> dict[str, PrefillPlan]:
    """The plans of a scheduler output, each in itself and with what the step schedules in order.

    Call it before the step does anything.

    Raises:
        PlanMismatchError: The output has none, not even an empty set: a scheduler without the gate made it. Or a
            plan breaks the rules of `PrefillPlan`, or is not for as many tokens as its request is scheduled for.
    """
    plans = getattr(scheduler_output, PLANS_ATTRIBUTE, None)
    if plans is None:
        raise PlanMismatchError(
            "the scheduler output carries no KDA prefill plans: the engine core runs without this fork's scheduler",
            f"set {GATE} alike in every process",
        )
    if not isinstance(plans, dict):
        raise PlanMismatchError(f"the scheduler output's KDA prefill plans are {plans!r}, not a dict of plans")
    for request_id, plan in plans.items():
        _check_plan(request_id, plan, scheduler_output.num_scheduled_tokens)
    return plans


def _check_plan(request_id: str, plan: PrefillPlan, num_scheduled_tokens: Mapping[str, int]) -> None:
    if not isinstance(plan, PrefillPlan):
        raise PlanMismatchError(f"KDA prefill plan of request {request_id} is {plan!r}, not a PrefillPlan")
    try:
        plan.check()
    except ValueError as error:
        raise PlanMismatchError(f"KDA prefill plan of request {request_id}: {error}") from None
    scheduled = num_scheduled_tokens.get(request_id)
    if scheduled is None:
        raise PlanMismatchError(f"{plan.named(request_id)}: the step has no such request")
    if scheduled != plan.end - plan.start:
        raise PlanMismatchError(f"{plan.named(request_id)}: the step computes {scheduled} tokens of the request")


class PlanLog:
    """Logs as many lines as `VLLM_B12X_KDA_PREFILL_COALESCING_LOG_LIMIT` says, and drops the rest."""

    def __init__(self) -> None:
        self._left: int = envs.VLLM_B12X_KDA_PREFILL_COALESCING_LOG_LIMIT

    @property
    def wants(self) -> bool:
        """Whether the next line will be logged."""
        return self._left > 0

    def line(self, message: str, *values: object) -> None:
        """Log a message with `%` placeholders and their values."""
        if self.wants:
            self._left -= 1
            logger.info(message, *values)
