# SPDX-License-Identifier: Apache-2.0
"""How many blocks probationary states may keep from older protected entries.

A cache that has run for a while is full: every free block holds an entry, and the least recently used one goes next.
Whether a checkpoint of the prompt just computed is worth more than that entry depends on the traffic: on whether
prompts branch, and on how old that entry is. So the quota is learnt from two lists of names: of the protected entries,
and of the probationary states, that went last. A request that would have hit one of them says which side lacks blocks
(two shadow queues, as in Cidon et al., "Cliffhanger: Scaling Performance Cliffs in Web Memory Caches", NSDI 2016;
Megiddo and Modha's ARC, FAST 2003, is the best known of the kind). The quota starts at nothing: probationary states
get free blocks only until the traffic shows that they are missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, KVCacheBlock, get_block_hash, get_group_id

MEMORY = 8
"""One of so many blocks of the pool is what either list remembers."""

STEPS, SPAN_BLOCKS = 64, 16
"""A request that lacks 16 Mamba blocks of tokens (8,192 tokens) moves the quota by one of 64 parts of the pool.

Quicker, a single request throws a small pool about; slower, a busy server takes long to learn.
"""


class Ghosts:
    """Names of entries that are gone, the newest `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._names: dict[bytes, None] = {}

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: bytes, at_least: int = 0) -> None:
        """Remember `name` as the newest, and forget the oldest beyond the capacity or `at_least`."""
        self._names.pop(name, None)
        self._names[name] = None
        while len(self._names) > max(self._capacity, at_least):
            del self._names[next(iter(self._names))]

    def discard(self, name: bytes) -> None:
        self._names.pop(name, None)

    def clear(self) -> None:
        self._names.clear()


class Reach(NamedTuple):
    """How far a request's prompt could have been reused.

    Attributes:
        hit: Tokens of its prefix-cache hit.
        protected: Tokens of the hit there would be, had the last protected entries to go been kept.
        probationary: Tokens of the hit there would be, had the last probationary states to go been kept.
    """

    hit: int
    protected: int
    probationary: int


class ProbationaryQuota:
    """The number of free blocks up to which probationary states are not evicted before protected entries.

    Attributes:
        blocks: The quota. Probationary states may push out the least recently used protected entries until they hold
            so many free blocks, and are themselves pushed out only beyond them.
    """

    def __init__(self, num_blocks: int, num_groups: int, mamba_block: int, state_group: int) -> None:
        """
        Args:
            num_blocks: Blocks of the pool.
            num_groups: Blocks of one state, one a Mamba group.
            mamba_block: Tokens of a Mamba block.
            state_group: The KV cache group whose entry stands for the whole state.
        """
        self.blocks = 0
        self._exact = 0.0
        self._num_groups = num_groups
        self._num_blocks = num_blocks
        self._span = SPAN_BLOCKS * mamba_block
        self._state_group = state_group
        remembered = max(num_blocks // MEMORY, 1)
        self._protected = Ghosts(remembered)
        self._probationary = Ghosts(max(remembered // num_groups, 1))

    @property
    def remembers(self) -> bool:
        """Whether there is anything to learn from: not while the pool has blocks without an entry."""
        return bool(self._protected or self._probationary)

    def note_protected_evictions(self, blocks: list[KVCacheBlock], held: int) -> None:
        """Protected entries go, still on their blocks, while probationary states hold `held` free blocks.

        Without these an entry would have been kept until as many more had gone: it is remembered for so long.
        """
        for name in _entries(blocks):
            self._protected.add(name, held)

    def note_probationary_evictions(self, blocks: list[KVCacheBlock]) -> None:
        """Probationary entries go, still on their blocks."""
        for name in _entries(blocks):
            if get_group_id(name) == self._state_group:
                self.note_lost_state(get_block_hash(name))

    def note_lost_state(self, name: BlockHash) -> None:
        """A probationary state was dropped, or given no block because protected entries hold them."""
        self._probationary.add(name)

    def note_kept_state(self, name: BlockHash) -> None:
        """A probationary state has been given blocks (again)."""
        self._probationary.discard(name)

    def was_protected(self, name: BlockHashWithGroupId) -> bool:
        """Whether the name is one of the last protected entries to go."""
        return name in self._protected

    def was_probationary(self, name: BlockHash) -> bool:
        """Whether the name is one of the last probationary states to go."""
        return name in self._probationary

    def learn(self, reach: Reach) -> None:
        """Move the quota, in proportion to the pool, by the tokens that a request lacked: up by what probationary
        states would have saved it, down by what protected entries would."""
        saved, cost = reach.probationary - reach.hit, reach.protected - reach.hit
        step = self._num_blocks * (saved - cost) / (STEPS * self._span)
        self._exact = min(max(self._exact + step, 0.0), self._num_blocks / 2)
        # Whole states: a state that lacks one of its blocks is none.
        self.blocks = int(self._exact) // self._num_groups * self._num_groups

    def forget(self) -> None:
        """The cache has been emptied: what went before is nobody's loss any more. The quota itself stays."""
        self._protected.clear()
        self._probationary.clear()


def _entries(blocks: list[KVCacheBlock]) -> Iterator[BlockHashWithGroupId]:
    """Names of the entries that blocks hold."""
    return (block.block_hash for block in blocks if block.block_hash is not None)
