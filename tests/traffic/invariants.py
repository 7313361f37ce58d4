# SPDX-License-Identifier: Apache-2.0
"""What must hold of the block pool, the block tables and the blocks' contents, whatever the traffic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_kda_prefill.spans import mamba_managers
from vllm_kda_prefill.toymodel.fingerprints import Fingerprints
from vllm_kda_prefill.toymodel.kda import WINDOW
from vllm_kda_prefill.toymodel.worker import ToyWorker


@dataclass(frozen=True)
class NamedPrefix:
    """The tokens that a block hash names: the first `tokens` of a text with these prefix fingerprints."""

    tokens: int
    prefixes: Fingerprints


Entry = tuple[int, int, NamedPrefix]
"""KV cache group, block id and the prefix whose content the prefix cache would serve from it."""


def cache_entries(scheduler: Scheduler, names: Mapping[bytes, NamedPrefix]) -> list[Entry]:
    """Everything that the prefix cache would serve right now."""
    entries = []
    for key, found in scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache.items():
        blocks = found.values() if isinstance(found, dict) else (found,)
        for block in blocks:
            entries.append((get_group_id(key), block.block_id, names[get_block_hash(key)]))
    return entries


def check_contents(worker: ToyWorker, entries: list[Entry]) -> None:
    """Every block that the prefix cache would serve holds what its hash names."""
    blocks, size = worker.blocks, worker.blocks.attention_block
    for group, block_id, named in entries:
        end = named.tokens
        if group == worker.attention_group:
            first = (end - 1) // size * size
            held, expected = blocks.row_shadow[block_id, : end - first], named.prefixes[first + 1 : end + 1]
        else:
            held = np.append(blocks.window_shadow[block_id, :WINDOW], blocks.state_shadow[block_id])
            expected = named.prefixes[[end - 2, end - 1, end, end]]
        assert blocks.group[block_id] == group, (
            f"block {block_id} is cached in group {group} and was written by {blocks.group[block_id]}"
        )
        assert np.array_equal(held, expected), f"block {block_id} of group {group} is not the prefix of {end} tokens"


def check_ownership(scheduler: Scheduler) -> None:
    """Reference counts are the columns that name a block; shared blocks are cached; free blocks are in no column."""
    manager = scheduler.kv_cache_manager
    columns: Counter[int] = Counter()
    for single_type in manager.coordinator.single_type_managers:
        for request_id, blocks in single_type.req_to_blocks.items():
            own = [block.block_id for block in blocks if not block.is_null]
            assert len(own) == len(set(own)), f"request {request_id} has a block in two columns"
            columns.update(own)
    free = {block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()}
    assert manager.block_pool.free_block_queue.num_free_blocks == len(free)
    for block in manager.block_pool.blocks:
        if block.is_null:
            continue
        block_id = block.block_id
        assert block.ref_cnt == columns[block_id], (
            f"block {block_id}: {block.ref_cnt} references, {columns[block_id]} columns"
        )
        assert (block.ref_cnt == 0) == (block_id in free), f"block {block_id} is in use and free, or neither"
        assert columns[block_id] < 2 or block.block_hash is not None, f"block {block_id} is shared and not cached"


def check_names(scheduler: Scheduler) -> None:
    """Every name of the prefix cache is one that its block knows of, so that all go with it; and none is lost."""
    pool = scheduler.kv_cache_manager.block_pool
    held: Counter[int] = Counter()
    for found in pool.cached_block_hash_to_block._cache.values():
        held.update(list(found) if isinstance(found, dict) else [found.block_id])
    for block in pool.blocks:
        more = pool.cached_block_hashes_by_block.get(block.block_id, set())
        assert not more or block.block_hash is not None, f"block {block.block_id} has more names and no first one"
        names = {name for name in (block.block_hash, *more) if name is not None}
        assert held[block.block_id] == len(names), (
            f"block {block.block_id} knows {len(names)} names of {held[block.block_id]}"
        )
        for name in names:
            assert pool.cached_block_hash_to_block.contain(name, block.block_id), f"block {block.block_id} is not found"


def check_tables(scheduler: Scheduler, worker: ToyWorker) -> None:
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


def check_nothing_leaked(scheduler: Scheduler) -> None:
    """Without requests every block is free and no manager remembers one."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
    for single_type in manager.coordinator.single_type_managers:
        assert not single_type.req_to_blocks
    for mamba in mamba_managers(manager):
        assert not mamba._checkpoints
        assert not mamba._allocated_block_reqs
        assert not mamba.last_state_block_idx
        assert not mamba._partial_hit_reqs
