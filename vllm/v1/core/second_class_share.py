# SPDX-License-Identifier: Apache-2.0
"""How many pages second-class states may keep from older first-class entries.

A cache that has run for a while is full: every free page holds an entry, and the least recently used one goes next.
Whether a rung of the prompt just computed is worth more than that entry depends on the traffic: on whether prompts
branch, and on how old that entry is. So the share is learnt from two lists of equal length: names of the first-class
entries, and of the second-class states, that went last. A request that would have hit one of them says which side
lacks pages (two shadow queues, as in Cidon et al., "Cliffhanger: Scaling Performance Cliffs in Web Memory Caches",
NSDI 2016; Megiddo and Modha's ARC, FAST 2003, is the best known of the kind). The share starts at nothing: second-class
states are guests until the traffic shows that they are missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, KVCacheBlock

MEMORY = 8
"""One of so many pages of the pool is what either list remembers."""

STEPS, SPAN_PAGES = 64, 16
"""A request that lacks 16 recurrent pages of tokens (8,192 tokens) moves the share by one of 64 parts of the pool.

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
        first_class: Tokens of the hit there would be, had the last first-class entries to go been kept.
        all_states: Tokens of the hit there would be, had the last second-class states to go been kept.
    """

    hit: int
    first_class: int
    all_states: int


class SecondClassShare:
    """The number of pages that second-class states are protected up to.

    Attributes:
        pages: The share: second-class states may push out the least recently used first-class entries until they
            hold so many free pages, and are themselves pushed out only beyond them.
    """

    def __init__(self, num_blocks: int, groups: int, page: int) -> None:
        """
        Args:
            num_blocks: Pages of the pool.
            groups: Pages of one state.
            page: Tokens of a recurrent page.
        """
        self.pages = 0
        self._exact = 0.0
        self._groups = groups
        self._num_blocks = num_blocks
        self._span = SPAN_PAGES * page
        remembered = max(num_blocks // MEMORY, 1)
        self._first_class = Ghosts(remembered)
        self._second_class = Ghosts(max(remembered // groups, 1))

    @property
    def remembers(self) -> bool:
        """Whether there is anything to learn from: not while the pool has vacant pages."""
        return bool(self._first_class or self._second_class)

    def note_first_class_eviction(self, name: BlockHashWithGroupId, held: int) -> None:
        """A first-class entry went while second-class states hold `held` free pages.

        Without these it would have been kept until as many more had gone: it is remembered for so long.
        """
        self._first_class.add(name, held)

    def note_lost_state(self, name: BlockHash) -> None:
        """A second-class state was dropped, or given no page because first-class entries hold them."""
        self._second_class.add(name)

    def note_kept_state(self, name: BlockHash) -> None:
        """A second-class state has been given pages (again)."""
        self._second_class.discard(name)

    def was_first_class(self, name: BlockHashWithGroupId) -> bool:
        """Whether the name is one of the last first-class entries to go."""
        return name in self._first_class

    def was_second_class(self, name: BlockHash) -> bool:
        """Whether the name is one of the last second-class states to go."""
        return name in self._second_class

    def learn(self, reach: Reach) -> None:
        """Move the share, in proportion to the pool, by the tokens that a request lacked: up by what second-class
        states would have saved it, down by what first-class entries would."""
        saved, cost = reach.all_states - reach.hit, reach.first_class - reach.hit
        step = self._num_blocks * (saved - cost) / (STEPS * self._span)
        self._exact = min(max(self._exact + step, 0.0), self._num_blocks / 2)
        # Whole states: a state that lacks one of its pages is none.
        self.pages = int(self._exact) // self._groups * self._groups

    def forget(self) -> None:
        """The cache has been emptied: what went before is nobody's loss any more. The share itself stays."""
        self._first_class.clear()
        self._second_class.clear()


def entries(blocks: list[KVCacheBlock]) -> Iterator[BlockHashWithGroupId]:
    """Names of the entries that pages hold."""
    return (block.block_hash for block in blocks if block.block_hash is not None)
