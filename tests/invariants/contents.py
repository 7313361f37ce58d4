# SPDX-License-Identifier: Apache-2.0
"""What must hold of the blocks' contents and of the worker's block tables, whatever the traffic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tests.invariants.checked_worker import CheckedWorker
from tests.invariants.fingerprints import Fingerprints
from tests.invariants.pool import entries
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_kda_prefill.toymodel.kda import WINDOW


@dataclass(frozen=True)
class NamedPrefix:
    """The tokens that a block hash names: the first `tokens` of a text with these prefix fingerprints."""

    tokens: int
    prefixes: Fingerprints


Entry = tuple[int, int, NamedPrefix]
"""KV cache group, block id and the prefix whose content the prefix cache would serve from it."""


def cache_entries(scheduler: Scheduler, names: Mapping[bytes, NamedPrefix]) -> list[Entry]:
    """Everything that the prefix cache would serve right now."""
    pool = scheduler.kv_cache_manager.block_pool
    return [(get_group_id(key), block.block_id, names[get_block_hash(key)]) for key, block in entries(pool)]


def check_contents(worker: CheckedWorker, served: list[Entry]) -> None:
    """Every block that the prefix cache would serve holds what its hash names."""
    held_by, size = worker.prefixes, worker.blocks.attention_block
    for group, block_id, named in served:
        end = named.tokens
        if group == worker.attention_group:
            first = (end - 1) // size * size
            held, expected = held_by.rows[block_id, : end - first], named.prefixes[first + 1 : end + 1]
        else:
            held = np.append(held_by.windows[block_id, :WINDOW], held_by.states[block_id])
            expected = named.prefixes[[end - 2, end - 1, end, end]]
        assert held_by.group[block_id] == group, (
            f"block {block_id} is cached in group {group} and was written by {held_by.group[block_id]}"
        )
        assert np.array_equal(held, expected), f"block {block_id} of group {group} is not the prefix of {end} tokens"


def check_tables(scheduler: Scheduler, worker: CheckedWorker) -> None:
    """Wherever the allocator names a block, the worker's append-only table names the same one."""
    for single_type in scheduler.kv_cache_manager.coordinator.single_type_managers:
        group = single_type.kv_cache_group_id
        for request_id, request in worker.requests.items():
            table = request.tables[group]
            for column, block in enumerate(single_type.req_to_blocks.get(request_id, ())):
                if not block.is_null:
                    assert table[column] == block.block_id, (
                        f"request {request_id}, group {group}, column {column}: the worker has block "
                        f"{table[column]}, the allocator {block.block_id}"
                    )
