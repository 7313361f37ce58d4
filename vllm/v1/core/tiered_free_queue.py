# SPDX-License-Identifier: Apache-2.0
"""A free list with three tiers: blocks without a cached entry, probationary entries, protected entries.

vLLM counts every free block as available, cached or not, so an extra retained state could push a better entry out of
the prefix cache. Here probationary entries beyond their quota are evicted before any protected one, and the blocks
that can be had without losing a protected entry can be counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.core.probationary_quota import ProbationaryQuota


class Tier(IntEnum):
    """Where a block is, in eviction order; `IN_USE` blocks are in no list."""

    EMPTY = 0
    PROBATIONARY = 1
    PROTECTED = 2
    IN_USE = 3


class TieredFreeQueue:
    """Takes the place of a block pool's `FreeKVCacheBlockQueue`, with the same methods and eviction order
    but for probationary entries beyond their quota of blocks, which go before all protected ones.

    A block stays probationary until its entry is evicted, or a lookup hits it: then it has proven its worth.

    Attributes:
        quota: Free blocks that probationary entries keep while a protected entry can go. It is told of every entry
            that goes.
    """

    def __init__(self, num_blocks: int, free_blocks: list[KVCacheBlock], quota: ProbationaryQuota) -> None:
        self._lists = tuple(FreeKVCacheBlockQueue([]) for _ in range(Tier.IN_USE))
        self._tier = bytearray([Tier.IN_USE]) * num_blocks
        self._probationary: set[int] = set()
        self.num_free_blocks = 0
        self.quota = quota
        self._put(free_blocks, Tier.EMPTY)

    @classmethod
    def install(cls, pool: BlockPool, quota: ProbationaryQuota) -> TieredFreeQueue:
        """Put a tiered queue in the place of `pool`'s own, before the pool has cached anything."""
        assert not isinstance(pool.free_block_queue, cls), "the free queue is replaced once"
        assert len(pool.cached_block_hash_to_block) == 0, "the free queue is replaced before the first request"
        free_blocks = pool.free_block_queue.popleft_n(pool.free_block_queue.num_free_blocks)
        queue = cls(len(pool.blocks), free_blocks, quota)
        pool.free_block_queue = queue  # type: ignore[assignment]
        return queue

    def mark_probationary(self, block: KVCacheBlock) -> None:
        """Make the entry that `block`, still in use, holds a probationary one."""
        assert self._tier[block.block_id] == Tier.IN_USE
        self._probationary.add(block.block_id)

    def make_way(self, count: int) -> bool:
        """Put the `count` blocks that a probationary state may take in front of all others, if there are so many.

        Within the quota these are the next blocks of all, so that the oldest protected entries go. Beyond it, the
        state takes blocks without an entry and the oldest probationary ones.

        Returns:
            Whether the next `count` blocks are the state's: take them before anything else is taken or freed. If not,
            the queue is as it was: the state would have to push out protected entries beyond the quota.
        """
        own = self.num_probationary
        within = own + count <= self.quota.blocks
        if not within and not self._is_vacant(count - own):
            return False
        self._put(self._take(count, *self._limits(count, self.quota.blocks if within else 0)), Tier.EMPTY, front=True)
        return True

    def _is_vacant(self, count: int) -> bool:
        """Whether the next `count` blocks, probationary ones not counted, hold no entry."""
        count -= self._lists[Tier.EMPTY].num_free_blocks
        # Entries dropped in place (an eviction by id) leave empty blocks in the last list.
        for block in self._lists[Tier.PROTECTED].iter_blocks_after(None):
            if count <= 0 or block.block_hash is not None:
                break
            count -= 1
        return count <= 0

    def forget(self) -> None:
        """Every entry has been dropped: all free blocks are empty, in the order of their tiers."""
        self._probationary.clear()
        count = self.num_free_blocks
        tiers = (Tier.EMPTY, Tier.PROBATIONARY, Tier.PROTECTED)
        self._put(self._take(count, *((tier, count) for tier in tiers)), Tier.EMPTY)

    def refresh(self, block: KVCacheBlock) -> None:
        """Make `block`, free with an entry, the last of its tier to be evicted."""
        tier = Tier(self._tier[block.block_id])
        assert tier in (Tier.PROBATIONARY, Tier.PROTECTED)
        self._lists[tier].remove(block)
        self._lists[tier].append(block)

    @property
    def num_probationary(self) -> int:
        """Free blocks that hold a probationary entry."""
        return self._lists[Tier.PROBATIONARY].num_free_blocks

    # What vLLM's block pool and offloading manager call.

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        return self._take(n, *self._limits(n, self.quota.blocks))

    def _limits(self, n: int, quota: int) -> tuple[tuple[Tier, int], ...]:
        """How many of the next `n` blocks each tier gives in turn, at most, under a quota."""
        return (
            (Tier.EMPTY, n),
            (Tier.PROBATIONARY, max(self.num_probationary - quota, 0)),
            (Tier.PROTECTED, n),
            (Tier.PROBATIONARY, n),
        )

    def _take(self, n: int, *limits: tuple[Tier, int]) -> list[KVCacheBlock]:
        """The next `n` blocks: of each tier in turn at most so many."""
        if n > self.num_free_blocks:
            raise ValueError(f"{n} free blocks asked for, {self.num_free_blocks} are left")
        self.num_free_blocks -= n
        blocks: list[KVCacheBlock] = []
        for tier, limit in limits:
            count = min(n - len(blocks), limit, self._lists[tier].num_free_blocks)
            if count:
                taken = self._lists[tier].popleft_n(count)
                if tier == Tier.PROTECTED:
                    self.quota.note_protected_evictions(taken, held=self.num_probationary)
                elif tier == Tier.PROBATIONARY:
                    self.quota.note_probationary_evictions(taken)
                blocks += taken
        assert len(blocks) == n
        for block in blocks:
            self._tier[block.block_id] = Tier.IN_USE
            self._probationary.discard(block.block_id)
        return blocks

    def remove(self, block: KVCacheBlock) -> None:
        tier = self._tier[block.block_id]
        assert tier != Tier.IN_USE, f"block {block.block_id} is not free"
        self._lists[tier].remove(block)
        self.num_free_blocks -= 1
        self._tier[block.block_id] = Tier.IN_USE
        self._probationary.discard(block.block_id)

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        if not self._probationary:
            self._put(blocks, Tier.PROTECTED)
            return
        self._put([block for block in blocks if block.block_id in self._probationary], Tier.PROBATIONARY)
        self._put([block for block in blocks if block.block_id not in self._probationary], Tier.PROTECTED)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        for block in blocks:
            self._probationary.discard(block.block_id)
        self._put(blocks, Tier.EMPTY, front=True)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        return [block for queue in self._lists for block in queue.get_all_free_blocks()]

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        first = 0 if cursor is None else self._tier[cursor.block_id]
        for queue in self._lists[first:]:
            yield from queue.iter_blocks_after(cursor)
            cursor = None

    def _put(self, blocks: list[KVCacheBlock], tier: Tier, front: bool = False) -> None:
        queue = self._lists[tier]
        if front:
            queue.prepend_n(blocks)
        else:
            queue.append_n(blocks)
        self.num_free_blocks += len(blocks)
        for block in blocks:
            self._tier[block.block_id] = tier
