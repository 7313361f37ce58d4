# SPDX-License-Identifier: Apache-2.0
"""Turn the plans of a scheduler output into rows of the worker's packed batch, or refuse.

Nothing is derived here a second time. A plan that does not fit the worker's own idea of the step is an error: a
state written to the wrong block is served later as a fluent wrong answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.v1.core.prefill_plan import MAX_CHECKPOINTS, PlanMismatchError, PrefillPlan

Int32Rows = npt.NDArray[np.int32]
Counts = Sequence[int] | npt.NDArray[Any]


@dataclass(frozen=True)
class CheckpointRows:
    """What each request of a packed batch exports.

    Attributes:
        offsets: int32 `[num_reqs, 4]`, tokens after the row's query start, ascending; 0 where inactive. No rows at
            all where the batch exports nothing.
        block_ids: KV cache group id -> int32 `[num_reqs, 4]`, where the states go; 0 where inactive.
    """

    offsets: Int32Rows
    block_ids: Mapping[int, Int32Rows]


NOTHING = CheckpointRows(np.zeros((0, MAX_CHECKPOINTS), np.int32), {})
"""The rows of a batch that exports nothing."""


def bind_rows(
    plans: Mapping[str, PrefillPlan],
    *,
    request_ids: Sequence[str],
    num_computed_tokens: Counts,
    num_scheduled_tokens: Counts,
    query_start_loc: Counts,
    group_ids: Collection[int],
    num_blocks: int,
) -> CheckpointRows:
    """Lay out plans in packed request order and check each against its row.

    Args:
        plans: Request id -> plan, as `plans_of` checked them.
        request_ids: Requests of the batch, in row order.
        num_computed_tokens: Tokens computed before this step, a row each.
        num_scheduled_tokens: Tokens of this step, a row each.
        query_start_loc: First token of each row in the packed batch, and the total.
        group_ids: The worker's Mamba KV cache groups.
        num_blocks: Blocks of the KV cache.

    Returns:
        The rows; `NOTHING` where there are no plans.

    Raises:
        PlanMismatchError: A plan names a request that is not in the batch, another query span, other KV cache
            groups, or a block that is out of range or another plan's. The message names both sides.
    """
    if not plans:
        return NOTHING
    rows = {request_id: row for row, request_id in enumerate(request_ids)}
    if len(rows) != len(request_ids):
        raise PlanMismatchError(f"the batch names a request twice: {list(request_ids)}")
    offsets = np.zeros((len(request_ids), MAX_CHECKPOINTS), np.int32)
    block_ids = {group: np.zeros_like(offsets) for group in group_ids}
    owners: dict[int, str] = {}
    for request_id, plan in plans.items():
        row = rows.get(request_id)
        if row is None:
            raise PlanMismatchError(f"{plan.named(request_id)}: the batch has no such request")
        start = int(num_computed_tokens[row])
        span = (start, start + int(num_scheduled_tokens[row]))
        length = int(query_start_loc[row + 1]) - int(query_start_loc[row])
        if span != (plan.start, plan.end) or length != plan.end - plan.start:
            raise PlanMismatchError(
                f"{plan.named(request_id)}: its row {row} computes [{span[0]}, {span[1]}) in {length} packed tokens"
            )
        if set(plan.block_ids) != set(group_ids):
            raise PlanMismatchError(
                f"{plan.named(request_id)}: blocks for KV cache groups {sorted(plan.block_ids)}, "
                f"the worker has {sorted(group_ids)}"
            )
        _claim_blocks(request_id, plan, owners, num_blocks)
        count = len(plan.positions)
        offsets[row, :count] = plan.offsets
        for group, own in plan.block_ids.items():
            block_ids[group][row, :count] = own
    return CheckpointRows(offsets, block_ids)


def _claim_blocks(request_id: str, plan: PrefillPlan, owners: dict[int, str], num_blocks: int) -> None:
    """Note in `owners` whose blocks a plan's are.

    Raises:
        PlanMismatchError: One is not in the cache, or is another plan's.
    """
    for block_ids in plan.block_ids.values():
        for block_id in block_ids:
            if not 0 < block_id < num_blocks:
                raise PlanMismatchError(
                    f"{plan.named(request_id)}: block {block_id} is not one of the blocks 1 to {num_blocks - 1}"
                )
            if block_id in owners:
                raise PlanMismatchError(
                    f"{plan.named(request_id)}: block {block_id} is request {owners[block_id]}'s destination too"
                )
            owners[block_id] = request_id
