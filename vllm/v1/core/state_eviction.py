# SPDX-License-Identifier: Apache-2.0
"""Which free blocks exported states take, and what is learnt about their worth.

One owner of the free queue's tiers and of their quota: the KV cache manager talks to nobody else about either. Another
measure of what an entry is worth would take the place of this class, the queue and the quota together.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.boundary_attention import BoundaryAttentionManager
from vllm.v1.core.cache_groups import CacheGroups
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.core.probationary_quota import ProbationaryQuota, Reach
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.core.state_retention import LookupGrid, WantedState
from vllm.v1.core.tiered_free_queue import TieredFreeQueue
from vllm.v1.request import Request


class AttentionReach(NamedTuple):
    """How far attention's blocks reach.

    Attributes:
        cached: Tokens up to which they are cached.
        remembered: Tokens up to which they would be, had the last entries to go been kept.
    """

    cached: int
    remembered: int


class StateEviction:
    """Takes free blocks for exported states.

    A protected state takes the next free blocks, as any block of stock's does. A probationary state takes blocks
    without an entry, the oldest probationary ones, or within the quota the oldest protected ones.
    """

    def __init__(self, pool: BlockPool, groups: CacheGroups, grid: LookupGrid) -> None:
        """
        Args:
            pool: The block pool, before it has cached anything. Its free queue is replaced.
            groups: The groups with prefix-cache entries.
            grid: Where lookups can resume.
        """
        self._pool = pool
        self._groups = groups
        self._grid = grid
        self._state_group = groups.mamba[0].kv_cache_group_id
        self._learnt: set[str] = set()
        self.quota = ProbationaryQuota(len(pool.blocks), len(groups.mamba), grid.mamba_block, self._state_group)
        self.queue = TieredFreeQueue.install(pool, self.quota)

    # Blocks for states.

    def take_blocks(self, state: WantedState, name: BlockHash) -> list[KVCacheBlock] | None:
        """Free blocks for a state, one a Mamba group, now in use; None if it can have none.

        Args:
            state: The state to export.
            name: Hash of its prefix.
        """
        count = len(self._groups.mamba)
        if count > self._pool.get_num_free_blocks():
            return None
        if not state.protected and not self.queue.make_way(count):
            self.quota.note_lost_state(name)
            return None
        blocks = self._pool.get_new_blocks(count)
        self.quota.note_kept_state(name)
        return blocks

    def note_published(self, block: KVCacheBlock, state: WantedState) -> None:
        """The entry of `state` is on `block`, which is in use."""
        if not state.protected:
            self.queue.mark_probationary(block)

    def refresh(self, block: KVCacheBlock) -> None:
        """Make `block`, free with an entry, as recently used as can be."""
        self.queue.refresh(block)

    def forget_entries(self) -> None:
        """The prefix cache has been emptied."""
        self.queue.forget()
        self.quota.forget()

    def levels(self) -> Mapping[str, int]:
        """Numbers of blocks for the metrics, by name."""
        return {"probationary_blocks": self.queue.num_probationary, "probationary_quota": self.quota.blocks}

    # Learning.

    def learn_from(self, request: Request, num_hit_tokens: int) -> None:
        """Let the quota learn from what a request finds in the cache, once, before it is given blocks of its own."""
        # A request that finds no room, or is preempted, is admitted again.
        if self.quota.remembers and request.request_id not in self._learnt:
            self._learnt.add(request.request_id)
            self.quota.learn(self.reach(request, num_hit_tokens))

    def forget_request(self, request: Request) -> None:
        """The request is finished."""
        self._learnt.discard(request.request_id)

    def reach(self, request: Request, hit: int) -> Reach:
        """How far a request's prompt could have been reused, had the last entries to go been kept."""
        block, length = self._grid.mamba_block, request.num_prompt_tokens
        protected = probationary = hit
        tail = self._grid.tail(length)
        attention = self._attention_reach(request, hit, tail)
        # Only the tail can be between two blocks.
        positions = itertools.chain(range(hit // block * block + block, tail, block), (tail,))
        for position in positions:
            if position > attention.remembered:
                break
            if position <= hit or not self._grid.is_reachable(position, length):
                continue
            name = self._name(request, position)
            if self._is_cached(name, self._state_group):
                if position > attention.cached:
                    protected = position
            elif self._was_protected(name, self._state_group):
                protected = position
            elif position <= attention.cached and self.quota.was_probationary(name):
                probationary = position
        return Reach(hit, protected, probationary)

    def _attention_reach(self, request: Request, hit: int, last: int) -> AttentionReach:
        """How far attention's blocks reach from a hit on, up to a prompt's tail."""
        if last <= hit:
            return AttentionReach(hit, hit)
        proof = self._grid.hit_alignment if self._grid.drop_block else 0
        reaches = [self._group_reach(manager, request, hit, last + proof) for manager in self._groups.attention]
        return AttentionReach(*(min(tokens) - proof for tokens in zip(*reaches, strict=True)))

    def _group_reach(self, manager: SingleTypeKVCacheManager, request: Request, hit: int, last: int) -> AttentionReach:
        """How far one group's names reach from a hit on: of whole blocks, and then of boundaries inside one."""
        size, group = manager.block_size, manager.kv_cache_group_id
        cached: int | None = None
        start = hit // size * size
        while start < last:
            end = start + size
            if end <= last and self._is_cached(self._name(request, end), group):
                start = end
                continue
            inside = {last} if last < end else set()
            if isinstance(manager, BoundaryAttentionManager):
                inside |= set(manager.boundary_names(start, min(end, last)))
            names = {position: self._name(request, position) for position in inside}
            found = [position for position, name in names.items() if self._is_cached(name, group)]
            cached = max(found, default=start) if cached is None else cached
            if end <= last and self._was_protected(self._name(request, end), group):
                start = end
                continue
            found += [position for position, name in names.items() if self._was_protected(name, group)]
            return AttentionReach(cached, max(found, default=start))
        return AttentionReach(last if cached is None else cached, last)

    def _name(self, request: Request, position: int) -> BlockHash:
        return self._pool._get_partial_block_hash(request, position)

    def _is_cached(self, name: BlockHash, group: int) -> bool:
        return self._pool.get_cached_block(name, [group]) is not None

    def _was_protected(self, name: BlockHash, group: int) -> bool:
        return self.quota.was_protected(make_block_hash_with_group_id(name, group))
