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

from vllm.v1.core.prefill_plan import MAX_CHECKPOINTS, PlanMismatchError, PrefillPlan

Int32Rows = npt.NDArray[np.int32]


@dataclass(frozen=True)
class CheckpointRows:
    """What each request of a packed batch exports.

    Attributes:
        offsets: int32 `[num_reqs, 4]`, tokens after the row's query start, ascending; 0 where inactive.
        slots: KV cache group id -> int32 `[num_reqs, 4]`, destination pages; 0 where inactive.
    """

    offsets: Int32Rows
    slots: Mapping[int, Int32Rows]


def bind_rows(
    plans: Mapping[str, PrefillPlan],
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
                f"{plan.named(request_id)}: pages for KV cache groups {sorted(plan.block_ids)}, "
                f"the worker has {sorted(group_ids)}"
            )
        count = len(plan.positions)
        offsets[row, :count] = plan.offsets
        for group, pages in plan.block_ids.items():
            for page in pages:
                if not 0 < page < num_pages:
                    raise PlanMismatchError(
                        f"{plan.named(request_id)}: page {page} is not one of the pages 1 to {num_pages - 1}"
                    )
                if page in owners:
                    raise PlanMismatchError(
                        f"{plan.named(request_id)}: page {page} is request {owners[page]}'s destination too"
                    )
                owners[page] = request_id
            slots[group][row, :count] = pages
    return CheckpointRows(offsets, slots)
