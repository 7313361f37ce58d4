# SPDX-License-Identifier: Apache-2.0
"""What must hold of the block pool and of the allocator's block tables after every step, whatever the traffic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.tiered_free_queue import Tier, TieredFreeQueue
from vllm_kda_prefill.spans import mamba_managers


def entries(pool: Any) -> Iterator[tuple[Any, Any]]:
    """All (key, block) pairs of a prefix cache."""
    for key, blocks in pool.cached_block_hash_to_block._cache.items():
        for block in blocks.values() if isinstance(blocks, dict) else (blocks,):
            yield key, block


def check_pool(scheduler: Scheduler) -> None:
    """Reference counts, free lists, tiers, names and tables agree, and only cached blocks are shared."""
    pool = scheduler.kv_cache_manager.block_pool
    columns = _check_tables(scheduler)
    owners = columns + Counter(block.block_id for _, blocks in scheduler.deferred_frees for block in blocks)
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    unused = {block.block_id for block in pool.blocks if not block.is_null and not block.ref_cnt}
    for block in pool.blocks:
        if block.is_null:
            continue
        block_id = block.block_id
        assert block.ref_cnt == owners[block_id], (
            f"block {block_id}: {block.ref_cnt} references, {owners[block_id]} owners"
        )
        assert columns[block_id] < 2 or block.block_hash is not None, f"block {block_id} is shared and not cached"
    assert set(free) == unused, f"blocks {sorted(set(free) ^ unused)} are in use and free, or neither"
    assert len(free) == len(unused) == pool.get_num_free_blocks(), "a block is twice in the free list, or miscounted"
    _check_names(pool)
    if isinstance(pool.free_block_queue, TieredFreeQueue):
        _check_tiers(pool.free_block_queue, pool.blocks)


def _check_tables(scheduler: Scheduler) -> Counter[int]:
    """No block is in two columns of a request or in two groups; block id -> columns that name it."""
    columns: Counter[int] = Counter()
    groups: dict[int, int] = {}
    for group, single_type in enumerate(scheduler.kv_cache_manager.coordinator.single_type_managers):
        for request_id, blocks in single_type.req_to_blocks.items():
            own = [block.block_id for block in blocks if not block.is_null]
            assert len(own) == len(set(own)), f"request {request_id} has a block in two columns: {own}"
            columns.update(own)
            for block_id in own:
                assert groups.setdefault(block_id, group) == group, f"block {block_id} is in two KV cache groups"
    return columns


def _check_names(pool: Any) -> None:
    """Every name of the prefix cache is one that its block knows of, so that all go with it; and none is lost."""
    held = Counter(block.block_id for _, block in entries(pool))
    for block in pool.blocks:
        more = pool.cached_block_hashes_by_block.get(block.block_id, set())
        assert not more or block.block_hash is not None, f"block {block.block_id} has more names and no first one"
        names = {name for name in (block.block_hash, *more) if name is not None}
        assert held[block.block_id] == len(names), (
            f"block {block.block_id} knows {len(names)} names of {held[block.block_id]}"
        )
        for name in names:
            assert pool.cached_block_hash_to_block.contain(name, block.block_id), f"block {block.block_id} is not found"


def _check_tiers(queue: TieredFreeQueue, blocks: list[Any]) -> None:
    assert queue._tier[0] == Tier.IN_USE, "the null block is on a free list"
    for block in blocks[1:]:
        block_id, tier = block.block_id, queue._tier[block.block_id]
        assert (tier == Tier.IN_USE) == (block.ref_cnt > 0), (
            f"block {block_id} with {block.ref_cnt} references is on tier {tier}"
        )
        assert tier != Tier.EMPTY or block.block_hash is None, f"block {block_id} holds an entry, on the empty list"
        marked = block_id in queue._probationary
        assert tier != Tier.PROBATIONARY or marked, f"block {block_id} is on the probationary list unmarked"
        assert tier != Tier.PROTECTED or not marked, f"block {block_id} is protected and marked probationary"
    for tier in (Tier.EMPTY, Tier.PROBATIONARY, Tier.PROTECTED):
        listed = [block.block_id for block in queue._lists[tier].get_all_free_blocks()]
        assert len(listed) == queue._lists[tier].num_free_blocks, f"list {tier.name} and its count differ"
        assert all(queue._tier[block_id] == tier for block_id in listed), f"list {tier.name} and its marks differ"


def check_nothing_leaked(scheduler: Scheduler) -> None:
    """Without requests every block is free and no manager remembers one."""
    assert not scheduler.requests
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
