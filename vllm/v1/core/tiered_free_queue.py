# SPDX-License-Identifier: Apache-2.0
"""A free list with three tiers: pages without a cached entry, second-class entries, first-class entries.

vLLM counts every free page as available, cached or not, so an extra retained state could push a better entry
out of the prefix cache. Here second-class entries beyond their share are evicted before any first-class one, and
the pages that can be had without losing a first-class entry can be counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock


class Tier(IntEnum):
    """Where a page is, in eviction order; `IN_USE` pages are in no list."""

    EMPTY = 0
    SECOND_CLASS = 1
    FIRST_CLASS = 2
    IN_USE = 3


class TieredFreeQueue:
    """Takes the place of a block pool's `FreeKVCacheBlockQueue`, with the same methods and eviction order
    but for second-class entries beyond their share of pages, which go before all first-class ones.

    A page stays second class until its entry is evicted, or a lookup hits it: then it has proven its worth.

    Attributes:
        share: Free pages that second-class entries keep while a first-class entry can go.
        on_eviction: Called with the tier and the pages, entries still on them, that are taken from a tier.
    """

    def __init__(self, num_blocks: int, free_blocks: list[KVCacheBlock]) -> None:
        self._lists = tuple(FreeKVCacheBlockQueue([]) for _ in range(Tier.IN_USE))
        self._tier = bytearray([Tier.IN_USE]) * num_blocks
        self._second_class: set[int] = set()
        self.num_free_blocks = 0
        self.share = 0
        self.on_eviction: Callable[[Tier, list[KVCacheBlock]], None] | None = None
        self._put(free_blocks, Tier.EMPTY)

    @classmethod
    def install(cls, pool: BlockPool) -> TieredFreeQueue:
        """Put a tiered queue in the place of `pool`'s own, before the pool has cached anything."""
        if isinstance(pool.free_block_queue, cls):
            return pool.free_block_queue
        assert len(pool.cached_block_hash_to_block) == 0, "the free queue is replaced before the first request"
        free_blocks = pool.free_block_queue.popleft_n(pool.free_block_queue.num_free_blocks)
        queue = cls(len(pool.blocks), free_blocks)
        pool.free_block_queue = queue  # type: ignore[assignment]
        return queue

    def mark_second_class(self, block: KVCacheBlock) -> None:
        """Make the entry that `block`, still in use, holds a second-class one."""
        assert self._tier[block.block_id] == Tier.IN_USE
        self._second_class.add(block.block_id)

    def admits(self, count: int) -> bool:
        """Whether second-class entries may take `count` pages: there are as many that are empty or their own, or they
        stay within their share."""
        second_class = self._lists[Tier.SECOND_CLASS].num_free_blocks
        return self._is_vacant(count - second_class) or second_class + count <= self.share

    @contextmanager
    def for_second_class(self, count: int) -> Iterator[None]:
        """Let the next `count` pages, which `admits` has agreed to, be taken for second-class entries."""
        second_class = self._lists[Tier.SECOND_CLASS].num_free_blocks
        share = self.share
        if second_class + count > share:
            # They replace older ones of their own.
            self.share = 0
        try:
            yield
        finally:
            self.share = share

    def _is_vacant(self, count: int) -> bool:
        """Whether the next `count` pages, second-class ones not counted, hold no entry."""
        count -= self._lists[Tier.EMPTY].num_free_blocks
        # Entries dropped in place (an eviction by id) leave empty pages in the last list.
        for block in self._lists[Tier.FIRST_CLASS].iter_blocks_after(None):
            if count <= 0 or block.block_hash is not None:
                break
            count -= 1
        return count <= 0

    def forget(self) -> None:
        """Every entry of a free page has been dropped: all free pages are empty, in the order of their tiers."""
        count = self.num_free_blocks
        tiers = (Tier.EMPTY, Tier.SECOND_CLASS, Tier.FIRST_CLASS)
        self._put(self._take(count, *((tier, count) for tier in tiers)), Tier.EMPTY)

    def refresh(self, block: KVCacheBlock) -> None:
        """Make `block`, free with an entry, the last of its tier to be evicted."""
        tier = Tier(self._tier[block.block_id])
        assert tier in (Tier.SECOND_CLASS, Tier.FIRST_CLASS)
        self._lists[tier].remove(block)
        self._lists[tier].append(block)

    @property
    def num_second_class(self) -> int:
        """Free pages that hold a second-class entry."""
        return self._lists[Tier.SECOND_CLASS].num_free_blocks

    # What vLLM's block pool and offloading manager call.

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        second_class = self._lists[Tier.SECOND_CLASS].num_free_blocks
        return self._take(
            n,
            (Tier.EMPTY, n),
            (Tier.SECOND_CLASS, max(second_class - self.share, 0)),
            (Tier.FIRST_CLASS, n),
            (Tier.SECOND_CLASS, n),
        )

    def _take(self, n: int, *limits: tuple[Tier, int]) -> list[KVCacheBlock]:
        """The next `n` pages: of each tier in turn at most so many."""
        if n > self.num_free_blocks:
            raise ValueError(f"{n} free blocks asked for, {self.num_free_blocks} are left")
        self.num_free_blocks -= n
        blocks: list[KVCacheBlock] = []
        for tier, limit in limits:
            count = min(n - len(blocks), limit, self._lists[tier].num_free_blocks)
            if count:
                taken = self._lists[tier].popleft_n(count)
                if self.on_eviction is not None and tier != Tier.EMPTY:
                    self.on_eviction(tier, taken)
                blocks += taken
        assert len(blocks) == n
        for block in blocks:
            self._tier[block.block_id] = Tier.IN_USE
            self._second_class.discard(block.block_id)
        return blocks

    def remove(self, block: KVCacheBlock) -> None:
        tier = self._tier[block.block_id]
        assert tier != Tier.IN_USE, f"block {block.block_id} is not free"
        self._lists[tier].remove(block)
        self.num_free_blocks -= 1
        self._tier[block.block_id] = Tier.IN_USE
        self._second_class.discard(block.block_id)

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        if not self._second_class:
            self._put(blocks, Tier.FIRST_CLASS)
            return
        self._put([block for block in blocks if block.block_id in self._second_class], Tier.SECOND_CLASS)
        self._put([block for block in blocks if block.block_id not in self._second_class], Tier.FIRST_CLASS)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        for block in blocks:
            self._second_class.discard(block.block_id)
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
