# SPDX-License-Identifier: Apache-2.0
"""Where rows with several checkpoints are cut for a kernel that exports one state and the final one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """Tokens `[begin, end)` of a row, relative to the row; entries of the `[N, 4]` tables or -1.

    Attributes:
        row: The row.
        begin: First token.
        end: One past the last token.
        offset: Tokens from `begin` to the checkpoint inside the segment; 0 where there is none.
        checkpoint: Table entry of that checkpoint.
        final: Table entry that the segment's end belongs to; -1 where it is the row's running state.
    """

    row: int
    begin: int
    end: int
    offset: int
    checkpoint: int
    final: int


def plan_segments(offsets: Sequence[Sequence[int]], query_lens: Sequence[int]) -> list[list[Segment]]:
    """Split every row into segments; launch `i` runs the `i`-th segment of each row that has one."""
    launches: list[list[Segment]] = []
    for row, (row_offsets, length) in enumerate(zip(offsets, query_lens, strict=True)):
        active = sorted((offset, entry) for entry, offset in enumerate(row_offsets) if offset)
        begin = number = 0
        while begin < length or number == 0:
            inner = active[2 * number] if 2 * number < len(active) else None
            cut = active[2 * number + 1] if 2 * number + 1 < len(active) else None
            end = cut[0] if cut else length
            if len(launches) == number:
                launches.append([])
            launches[number].append(
                Segment(
                    row=row,
                    begin=begin,
                    end=end,
                    offset=inner[0] - begin if inner else 0,
                    checkpoint=inner[1] if inner else -1,
                    final=cut[1] if cut else -1,
                )
            )
            begin, number = end, number + 1
    return launches
