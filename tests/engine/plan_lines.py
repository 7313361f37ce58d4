# SPDX-License-Identifier: Apache-2.0
"""What the scheduler and each rank of an engine logged of prefill plans."""

from __future__ import annotations

import ast
import re
from typing import Any

Plan = tuple[str, int, int, list[int], dict[int, tuple[int, ...]]]
"""Request, query span, checkpoint positions, and the block ids of each group."""

QUERY = r"query \[(\d+), (\d+)\)"
PLANNED = re.compile(rf"KDA prefill plan: request (\S+), {QUERY}, checkpoints (\[.*?\]), blocks (\{{.*\}})")
EXPORTED = re.compile(
    rf"\((Worker\S*) .*KDA prefill rows: request (\S+) in row 0, {QUERY}, offsets (\[.*?\]), blocks (\{{.*\}})"
)


def planned(log: str) -> list[Plan]:
    """The scheduler's plans."""
    return [
        (request, int(start), int(end), ast.literal_eval(positions), _block_ids(blocks))
        for request, start, end, positions, blocks in PLANNED.findall(log)
    ]


def exported(log: str) -> dict[str, list[Plan]]:
    """What each rank exported, its offsets turned to positions, where requests come one at a time."""
    ranks: dict[str, list[Plan]] = {}
    for rank, request, start, end, offsets, blocks in EXPORTED.findall(log):
        positions = [int(start) + offset for offset in ast.literal_eval(offsets)]
        ranks.setdefault(rank, []).append((request, int(start), int(end), positions, _block_ids(blocks)))
    return ranks


def _block_ids(blocks: str) -> dict[int, Any]:
    return {group: tuple(own) for group, own in ast.literal_eval(blocks).items()}
