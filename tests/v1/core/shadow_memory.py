# SPDX-License-Identifier: Apache-2.0
"""A KV cache of labels beside vLLM's scheduler, and what must hold of both after every step."""

from __future__ import annotations

import random
from typing import Any

from tests.v1.core.labels import Fault, Row, entries
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.core.tiered_free_queue import Tier, TieredFreeQueue
from vllm.v1.request import Request
from vllm_kda_prefill.planning import Engine


class ShadowMemory:
    """What blocks hold, and checks of the prefix cache, the block pool and the block tables against it.

    Attributes:
        state: Block id -> label of the state in it.
        kv: Block id -> offset in the block -> label of the token's KV.
        rows: What a worker knows of each request.
    """

    def __init__(self, engine: Engine, seed: int = 0, checked: bool = True) -> None:
        self.engine = engine
        self.scheduler: Scheduler = engine.scheduler
        self.checked = checked
        self.rng = random.Random(seed)
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        self.managers = managers
        self.mamba = [g for g, manager in enumerate(managers) if isinstance(manager, MambaManager)]
        cacheable = {g for g, manager in enumerate(managers) if manager.kv_cache_spec.prefix_cacheable}
        self.attention = sorted(cacheable - set(self.mamba))
        self.state: dict[int, int] = {}
        self.kv: dict[int, dict[int, int]] = {}
        self.rows: dict[str, Row] = {}
        self.requests: dict[str, Request] = {}
        self.expected: dict[bytes, tuple[int, str]] = {}
        self._reference: dict[str, Row] = {}
        self._known_hashes: dict[str, int] = {}

    def _promises(self) -> None:
        """Learn what the hashes of all requests stand for."""
        pool = self.scheduler.kv_cache_manager.block_pool
        for request_id, request in self.requests.items():
            known = self._known_hashes.get(request_id, 0)
            for index in range(known, len(request.block_hashes)):
                promise = ((index + 1) * pool.hash_block_size, request_id)
                self.expected.setdefault(bytes(request.block_hashes[index]), promise)
            self._known_hashes[request_id] = len(request.block_hashes)

    def promised(self, block_hash: bytes) -> tuple[int, Row]:
        """Token count and tokens of a hash."""
        num_tokens, request_id = self.expected[block_hash]
        request = self.requests[request_id]
        row = self._reference.get(request_id)
        if row is None or len(row.tokens) < num_tokens:
            row = self._reference[request_id] = Row([], 0, 0, list(request.all_token_ids))
        return num_tokens, row

    def check_cache(self) -> None:
        """Every entry of the prefix cache leads to a block with what its hash promises."""
        self._promises()
        manager = self.scheduler.kv_cache_manager
        for key, block in list(entries(manager.block_pool)):
            group = get_group_id(key)
            num_tokens, row = self.promised(bytes(get_block_hash(key)))
            if group in self.mamba:
                if self.state.get(block.block_id) != row.label(num_tokens):
                    raise Fault(f"block {block.block_id} is cached as the state after {num_tokens} tokens; it is not")
            else:
                size = self.managers[group].block_size
                slots = self.kv.get(block.block_id, {})
                for position in range((num_tokens - 1) // size * size, num_tokens):
                    if slots.get(position % size) != row.label(position + 1):
                        raise Fault(f"block {block.block_id} is cached up to {num_tokens}; token {position} is wrong")

    def check_pool(self) -> None:
        """Reference counts, free lists, tiers and tables agree."""
        pool = self.scheduler.kv_cache_manager.block_pool
        owners = self._check_tables()
        if self.scheduler.deferred_frees:
            return
        for block in pool.blocks[1:]:
            if block.ref_cnt != owners.get(block.block_id, 0):
                raise Fault(
                    f"block {block.block_id}: {block.ref_cnt} references, {owners.get(block.block_id, 0)} owners"
                )
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        unused = {block.block_id for block in pool.blocks[1:] if not block.ref_cnt}
        if len(free) != pool.get_num_free_blocks() or set(free) != unused:
            raise Fault("the free list is not the set of blocks without a reference")
        if isinstance(pool.free_block_queue, TieredFreeQueue):
            self._check_tiers(pool.free_block_queue, pool.blocks)

    def _check_tables(self) -> dict[int, int]:
        """No block is in two columns of a request or in two groups; blocks with the number of their owners."""
        owners: dict[int, int] = {}
        for single in self.managers:
            for request_id, blocks in single.req_to_blocks.items():
                live = [block.block_id for block in blocks if not block.is_null]
                if len(set(live)) != len(live):
                    raise Fault(f"{request_id}: a block is in two columns: {live}")
                for block_id in live:
                    owners[block_id] = owners.get(block_id, 0) + 1
        groups: dict[int, int] = {}
        for group, single in enumerate(self.managers):
            for blocks in single.req_to_blocks.values():
                for block in blocks:
                    if not block.is_null and groups.setdefault(block.block_id, group) != group:
                        raise Fault(f"block {block.block_id} is in two KV cache groups")
        return owners

    def _check_tiers(self, queue: TieredFreeQueue, blocks: list[Any]) -> None:
        if queue._tier[0] != Tier.IN_USE:
            raise Fault("the null block is on a free list")
        for block in blocks[1:]:
            tier = queue._tier[block.block_id]
            if (tier == Tier.IN_USE) != (block.ref_cnt > 0):
                raise Fault(f"block {block.block_id} with {block.ref_cnt} references is on tier {tier}")
            if tier == Tier.EMPTY and block.block_hash is not None:
                raise Fault(f"block {block.block_id} holds an entry and is on the empty list")
            if tier == Tier.PROBATIONARY and block.block_id not in queue._probationary:
                raise Fault(f"block {block.block_id} is on the probationary list unmarked")
            if tier == Tier.PROTECTED and block.block_id in queue._probationary:
                raise Fault(f"block {block.block_id} is on the protected list and marked probationary")
        for tier in (Tier.EMPTY, Tier.PROBATIONARY, Tier.PROTECTED):
            listed = [block.block_id for block in queue._lists[tier].get_all_free_blocks()]
            if len(listed) != queue._lists[tier].num_free_blocks or any(queue._tier[b] != tier for b in listed):
                raise Fault(f"list {tier.name} and its count or its marks differ")

    def check_all_returned(self) -> None:
        """No request is left and every block is free."""
        pool = self.scheduler.kv_cache_manager.block_pool
        assert not self.scheduler.requests
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert all(block.ref_cnt == 0 for block in pool.blocks[1:])
        assert not any(single.req_to_blocks for single in self.managers)
