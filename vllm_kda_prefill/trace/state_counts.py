# SPDX-License-Identifier: Apache-2.0
"""Counts the recurrent states that enter the prefix cache, are hit, and go: stock's and this fork's alike.

The block pool is watched where entries are made and dropped; nothing that it does changes. One group of KDA layers
stands for all of them: a state has an entry in each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from vllm.v1.core.cache_groups import CacheGroups
from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, KVCacheBlock, get_block_hash, get_group_id
from vllm.v1.core.lookup_grid import lookup_grid
from vllm.v1.core.state_retention import Retention
from vllm.v1.request import Request


class StateKind(StrEnum):
    """Why a state was there to be kept, the first of these that holds.

    Attributes:
        TAIL: The deepest state of a prompt that its repeat can resume at.
        JUNCTION: Where the prompt left a prefix that it shares with an earlier one.
        SPAN_END: Where a forward pass ended anyway.
        CHECKPOINT: Written inside a forward pass, at a checkpoint position of the policy.
    """

    TAIL = "tail"
    JUNCTION = "junction"
    SPAN_END = "span end"
    CHECKPOINT = "checkpoint position"


@dataclass
class _State:
    """A state in the prefix cache; `request`, whose prefill wrote it, until its kind is known."""

    position: int
    request: Request | None
    kind: StateKind = StateKind.CHECKPOINT
    hits: int = 0


@dataclass
class StateCounts:
    """What became of the states of one run.

    Attributes:
        kept: States that entered the prefix cache, by kind; one that comes again after its eviction counts again.
        hits: Requests that resumed at a state, by its kind.
        hit_tokens: Cached tokens of these requests.
        evicted: States whose entry went.
        evicted_unused: Of these, states that no request had resumed at.
    """

    kept: Counter[StateKind] = field(default_factory=Counter)
    hits: Counter[StateKind] = field(default_factory=Counter)
    hit_tokens: Counter[StateKind] = field(default_factory=Counter)
    evicted: int = 0
    evicted_unused: int = 0


class StateWatch:
    """Watches the states of one scheduler.

    Attributes:
        counts: So far.
    """

    def __init__(self, scheduler: Any) -> None:
        """
        Args:
            scheduler: Stock's or this fork's, before its first request.
        """
        manager = scheduler.kv_cache_manager
        self.counts = StateCounts()
        self._retention = Retention(lookup_grid(manager.coordinator))
        self._pool: Any = manager.block_pool
        self._hash_block: int = self._pool.hash_block_size
        self._group: int = CacheGroups.of(manager.coordinator).mamba_ids[0]
        self._states: dict[BlockHash, _State] = {}
        self._new: list[_State] = []
        self._gone: dict[BlockHash, _State] = {}
        self._request: Request | None = None
        self._is_moving = False
        self._watch()

    @property
    def held(self) -> int:
        """States in the prefix cache now."""
        return len(self._states)

    def note_step(self, admitted: Iterable[tuple[Request, int]]) -> None:
        """Call it after every `schedule()`: only then is it known where the passes of the step end.

        Args:
            admitted: Requests that the step admitted, with their cached tokens.
        """
        for state in self._new:
            state.kind = self._kind(state.request, state.position)
            self.counts.kept[state.kind] += 1
            state.request = None
        for request, tokens in admitted:
            if tokens:
                self._note_hit(request.block_hashes[tokens // self._hash_block - 1], tokens)
        self.counts.evicted += len(self._gone)
        self.counts.evicted_unused += sum(not state.hits for state in self._gone.values())
        self._new.clear()
        self._gone.clear()

    def _note_hit(self, name: BlockHash, tokens: int) -> None:
        # The step may have dropped the state after it was used.
        state = self._states.get(name) or self._gone[name]
        state.hits += 1
        self.counts.hits[state.kind] += 1
        self.counts.hit_tokens[state.kind] += tokens

    def _kind(self, request: Request | None, position: int) -> StateKind:
        assert request is not None, f"a state at {position} tokens was cached for no request"
        prompt = request.num_prompt_tokens
        if position == self._retention.grid.tail(prompt):
            return StateKind.TAIL
        if position == self._retention.junction(request.shared_prefix_boundary, prompt):
            return StateKind.JUNCTION
        return StateKind.SPAN_END if position == request.num_computed_tokens else StateKind.CHECKPOINT

    def _watch(self) -> None:
        """Stand between the pool and its callers. A method of the instance hides the class's."""
        pool = self._pool
        for method in ("cache_full_blocks", "cache_partial_block"):
            setattr(pool, method, self._for_request(getattr(pool, method)))
        insert, remove, move = pool._insert_block_hash, pool._remove_cached_block_hashes, pool.move_block_hashes

        def inserting(name: BlockHashWithGroupId, block: KVCacheBlock, num_tokens: int | None) -> None:
            insert(name, block, num_tokens=num_tokens)
            if get_group_id(name) == self._group and not self._is_moving:
                self._note_entry(get_block_hash(name), num_tokens)

        def removing(block: KVCacheBlock) -> list[BlockHashWithGroupId]:
            removed: list[BlockHashWithGroupId] = remove(block)
            for name in removed:
                if get_group_id(name) == self._group and not self._is_moving:
                    self._note_removal(name)
            return removed

        def moving(*args: Any, **kwargs: Any) -> None:
            self._is_moving = True
            move(*args, **kwargs)
            self._is_moving = False

        pool._insert_block_hash, pool._remove_cached_block_hashes, pool.move_block_hashes = inserting, removing, moving

    def _for_request(self, cache: Callable[..., Any]) -> Callable[..., Any]:
        def caching(request: Request, *args: Any, **kwargs: Any) -> Any:
            self._request = request
            return cache(request, *args, **kwargs)

        return caching

    def _note_entry(self, name: BlockHash, num_tokens: int | None) -> None:
        if name not in self._states:  # It may be in another block already.
            assert num_tokens is not None
            state = self._states[name] = _State(num_tokens, self._request)
            self._new.append(state)

    def _note_removal(self, name: BlockHashWithGroupId) -> None:
        if self._pool.cached_block_hash_to_block.get_one_block(name) is None:
            key = get_block_hash(name)
            self._gone[key] = self._states.pop(key)
