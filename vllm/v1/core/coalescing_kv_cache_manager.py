# SPDX-License-Identifier: Apache-2.0
"""The allocator's part: a page for every exported state, and two guards of the prefix cache.

Stock allocates a step's requests first, untouched. Once every request of the step has its pages, exports take
theirs from what is left, enter the prefix cache, and go back to the free list at once: the step's forward pass
writes them, and whoever is given such a page later runs after it. So an export never holds a page, never
changes a block table, and never decides whether a request runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from vllm.v1.core.lookup_grid import cacheable_managers, lookup_grid
from vllm.v1.core.second_class_share import Reach, SecondClassShare, entries
from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SingleTypeKVCacheManager
from vllm.v1.core.state_retention import LookupGrid, WantedState
from vllm.v1.core.tiered_free_queue import Tier, TieredFreeQueue
from vllm.v1.request import Request

Pages = dict[int, int]
"""KV cache group id -> page (block id) of one state."""


class StepPrefill(NamedTuple):
    """A prefill of the current step: its first token, and whether the step admits the request."""

    start: int
    is_admission: bool


class AttentionReach(NamedTuple):
    """Tokens up to which attention's blocks are cached, and would be had the last entries to go been kept."""

    cached: int
    remembered: int


def _columns_to_come(manager: SingleTypeKVCacheManager, request: Request, num_tokens: int, more: int = 0) -> int:
    """Columns that a request's block table in one group lacks for `num_tokens` tokens and `more` columns."""
    columns = -(-num_tokens // manager.block_size) + more
    return max(columns - len(manager.req_to_blocks.get(request.request_id, ())), 0)


class CoalescingKVCacheManager(KVCacheManager):
    """`KVCacheManager` that grants pages to exports and keeps unwritten blocks out of the prefix cache."""

    mamba_managers: tuple[MambaManager, ...]
    attention_managers: tuple[SingleTypeKVCacheManager, ...]
    free_queue: TieredFreeQueue
    grid: LookupGrid
    share: SecondClassShare
    _learnt: set[str]
    _exported: dict[str, list[tuple[KVCacheBlock, object]]]

    @classmethod
    def adopt(cls, manager: KVCacheManager) -> CoalescingKVCacheManager:
        """Turn the manager that stock's scheduler has just built into this class, in place.

        In place, because connectors and metrics already hold the object.
        """
        assert type(manager) is KVCacheManager, f"cannot adopt a {type(manager).__name__}"
        manager.__class__ = cls
        adopted = cast(CoalescingKVCacheManager, manager)
        adopted.mamba_managers, adopted.attention_managers = cacheable_managers(adopted.coordinator)
        adopted.free_queue = TieredFreeQueue.install(adopted.block_pool)
        adopted.grid = lookup_grid(adopted.coordinator)
        adopted._exported = {}
        adopted.share = SecondClassShare(
            len(adopted.block_pool.blocks), len(adopted.mamba_managers), adopted.grid.mamba_block
        )
        adopted._learnt = set()
        adopted.free_queue.on_eviction = adopted._note_evictions
        return adopted

    # Exports.

    def stock_checkpoint(self, request: Request) -> tuple[int, Pages] | None:
        """The state that stock's allocation of this step exports inside the request's query, if it keeps it.

        Returns:
            Its position, and its page in each Mamba group, or None. Its page is in the block table already.
        """
        request_id = request.request_id
        found = {m.kv_cache_group_id: m._checkpoints.get(request_id) for m in self.mamba_managers}
        checkpoints = set(found.values())
        assert len(checkpoints) == 1, f"Mamba groups differ in request {request_id}'s checkpoint: {found}"
        checkpoint = checkpoints.pop()
        if checkpoint is None:
            return None
        position, column = checkpoint
        blocks = {m.kv_cache_group_id: m.req_to_blocks[request_id][column] for m in self.mamba_managers}
        # Under sparse retention stock drops the entries of most chunks' checkpoints again.
        if any(block.block_hash_num_tokens != position for block in blocks.values()):
            return None
        return position, {group: block.block_id for group, block in blocks.items()}

    def grant(self, request: Request, wanted: Sequence[WantedState]) -> tuple[dict[int, Pages], list[KVCacheBlock]]:
        """Give a page in every Mamba group to each wanted state that can have one, and publish it.

        Call it once all of a step's requests are allocated, for a request that the step runs.

        Args:
            request: A request scheduled in this step.
            wanted: States to export, the most wanted first. A second-class state only takes pages without a
                cached entry, with an older second-class one, or within the share of `share`.

        Returns:
            The granted positions with their pages, and the blocks, in use, for the caller to free in this
            order. A state that is cached already, or has no page left, is not among them.
        """
        granted: dict[int, Pages] = {}
        blocks_in_use: list[KVCacheBlock] = []
        for state in wanted:
            name = self.block_pool._get_partial_block_hash(request, state.position)
            if self._is_cached(name):
                continue
            blocks = self._take_pages(state, name)
            if blocks is None:
                continue
            self.share.note_kept_state(name)
            for manager, block in zip(self.mamba_managers, blocks, strict=True):
                self._publish(request, manager, block, state)
            granted[state.position] = {
                m.kv_cache_group_id: block.block_id for m, block in zip(self.mamba_managers, blocks, strict=True)
            }
            blocks_in_use += blocks
        if blocks_in_use:
            exported = self._exported.setdefault(request.request_id, [])
            exported += ((block, block.block_hash) for block in blocks_in_use)
        return granted, blocks_in_use

    def free(self, request: Request) -> None:
        super().free(request)
        self._after_free(request)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        blocks = super().pop_blocks_for_free(request)
        self._after_free(request)
        return blocks

    def _after_free(self, request: Request) -> None:
        """Forget the request, and let its states be as recently used as its other blocks, as stock's are."""
        if request.is_finished():
            self._learnt.discard(request.request_id)
        for block, block_hash in self._exported.pop(request.request_id, ()):
            if block.ref_cnt == 0 and block.block_hash == block_hash:
                self.free_queue.refresh(block)

    def retain_end_state(self, request: Request, state: WantedState) -> None:
        """Publish the running state that a request's query leaves at its end, if its page holds just that.

        Stock does so under dense retention, and under sparse retention for few boundaries only. A state inside a
        page is overwritten there by the next query.
        """
        for manager in self.mamba_managers:
            pages, rest = divmod(state.position, manager.block_size)
            if rest:
                continue
            block = manager.req_to_blocks[request.request_id][pages - 1]
            if not block.is_null and block.block_hash is None:
                self._publish(request, manager, block, state)

    def _is_cached(self, name: BlockHash) -> bool:
        groups = [m.kv_cache_group_id for m in self.mamba_managers]
        return self.block_pool.get_cached_block(name, groups) is not None

    def _take_pages(self, state: WantedState, name: BlockHash) -> list[KVCacheBlock] | None:
        count = len(self.mamba_managers)
        if count > self.block_pool.get_num_free_blocks():
            return None
        if state.protected:
            return self.block_pool.get_new_blocks(count)
        if not self.free_queue.admits(count):
            self.share.note_lost_state(name)
            return None
        with self.free_queue.for_second_class(count):
            return self.block_pool.get_new_blocks(count)

    def _publish(self, request: Request, manager: MambaManager, block: KVCacheBlock, state: WantedState) -> None:
        self.block_pool.cache_partial_block(
            request=request,
            block=block,
            num_tokens=state.position,
            kv_cache_group_id=manager.kv_cache_group_id,
            block_size=manager.block_size,
        )
        if not state.protected:
            self.free_queue.mark_second_class(block)

    # What second-class states are worth.

    def learn_from(self, request: Request, num_hit_tokens: int) -> None:
        """Let the share learn from what a request finds in the cache, once, before it is given pages of its own."""
        if (
            not self.share.remembers
            or request.request_id in self._learnt
            or not self.prefix_cache_lookup_enabled(request)
        ):
            return
        # A request that finds no room, or is preempted, is admitted again.
        self._learnt.add(request.request_id)
        self.share.learn(self._reach(request, num_hit_tokens))
        self.free_queue.share = self.share.pages

    def reset_prefix_cache(self) -> bool:
        done = super().reset_prefix_cache()
        if done:
            self.free_queue.forget()
            self.share.forget()
        return done

    def _note_evictions(self, tier: Tier, blocks: list[KVCacheBlock]) -> None:
        if tier == Tier.FIRST_CLASS:
            for name in entries(blocks):
                self.share.note_first_class_eviction(name, self.free_queue.num_second_class)
            return
        for name in entries(blocks):
            if get_group_id(name) == self.mamba_managers[0].kv_cache_group_id:
                self.share.note_lost_state(get_block_hash(name))

    def _reach(self, request: Request, hit: int) -> Reach:
        """How far a request's prompt could have been reused, had the last entries to go been kept."""
        page, length = self.grid.mamba_block, request.num_prompt_tokens
        first_class = all_states = hit
        tail = self.grid.tail(length)
        attention = self._attention_reach(request, hit, tail)
        # Only the tail can be between two pages.
        positions = itertools.chain(range(hit // page * page + page, tail, page), (tail,))
        for position in positions:
            if position > attention.remembered:
                break
            if position <= hit or not self.grid.is_reachable(position, length):
                continue
            name = self.block_pool._get_partial_block_hash(request, position)
            if self._is_cached_state(name):
                if position > attention.cached:
                    first_class = position
            elif self.share.was_first_class(self._state_key(name)):
                first_class = position
            elif position <= attention.cached and self.share.was_second_class(name):
                all_states = position
        return Reach(hit, first_class, all_states)

    def _attention_reach(self, request: Request, hit: int, last: int) -> AttentionReach:
        """How far attention's blocks reach from a hit on, and would had the last entries to go been kept."""
        cached = remembered = last
        for manager in self.attention_managers:
            size, group = manager.block_size, manager.kv_cache_group_id
            for end in range(hit // size * size + size, last + 1, size):
                name = self.block_pool._get_partial_block_hash(request, end)
                if self.block_pool.get_cached_block(name, [group]) is not None:
                    continue
                cached = min(cached, end - size)
                if not self.share.was_first_class(make_block_hash_with_group_id(name, group)):
                    remembered = min(remembered, end - size)
                    break
        return AttentionReach(cached, remembered)

    def _state_key(self, name: BlockHash) -> BlockHashWithGroupId:
        return make_block_hash_with_group_id(name, self.mamba_managers[0].kv_cache_group_id)

    def _is_cached_state(self, name: BlockHash) -> bool:
        return self.block_pool.get_cached_block(name, [self.mamba_managers[0].kv_cache_group_id]) is not None

    # Admission.

    def has_room(self, request: Request, others: Iterable[Request], num_lookahead_tokens: int, decoded: int) -> bool:
        """Whether a request's whole sequence can be allocated for sure, states included, and besides what every other
        request needs: its whole sequence too, or where it decodes, what it grows by meanwhile.

        A span that runs past a stop of stock's takes pages a step earlier than stock would. In a pool too tight
        for that, another request would wait, lose its cached prefix, or be preempted.

        Args:
            request: The request whose span is longer than stock's.
            others: Requests that run or wait; looked at only until they exceed what is free.
            num_lookahead_tokens: Tokens after the sequence that `request` needs slots for.
            decoded: Most tokens that a decoding request needs slots for until `request` has its prompt.
        """
        free = self.block_pool.get_num_free_blocks()
        needed = self.watermark_blocks + self._most_pages(request, request.num_tokens + num_lookahead_tokens)
        for other in others:
            if needed > free:
                break
            if other is request:
                continue
            if other.num_computed_tokens >= other.num_tokens - 1:
                needed += self._growth(other, decoded)
            else:
                needed += self._most_pages(other, other.num_tokens)
        return needed <= free

    def _growth(self, request: Request, num_tokens: int) -> int:
        """Pages that `num_tokens` more tokens of a decoding request take."""
        end = request.num_computed_tokens + num_tokens
        # One group stands for all of its kind: a busy server asks this for hundreds of requests.
        recurrent = self.mamba_managers[0]
        pages = len(self.mamba_managers) * _columns_to_come(recurrent, request, end, recurrent.num_speculative_blocks)
        return pages + sum(_columns_to_come(manager, request, end) for manager in self.attention_managers)

    def _most_pages(self, request: Request, num_tokens: int) -> int:
        """Upper bound of the free pages that a request's first `num_tokens` tokens still take: all of a prefix hit
        counts as evictable."""
        pages = 0
        for manager in self.coordinator.single_type_managers:
            if isinstance(manager, MambaManager):
                # Running state, hit, copy-on-write and stock's checkpoint, besides the speculative states.
                pages += 4 + manager.num_speculative_blocks
            elif not manager.kv_cache_spec.prefix_cacheable:
                # Scratch, of a size that has nothing to do with tokens (the indexer's open pool: one block a request).
                pages += manager.get_num_blocks_to_allocate(request.request_id, num_tokens, (), 0, 0, num_tokens)
            else:
                pages += _columns_to_come(manager, request, num_tokens) + 1
        return pages

    # Guards.

    def copies_unwritten_block(
        self,
        request: Request,
        num_hit_tokens: int,
        prefills: Mapping[str, StepPrefill],
        max_hit_length: int | None = None,
    ) -> bool:
        """Whether admitting `request` would copy an attention block that this step still has to write.

        A partial hit copies the hit's last attention block before the forward pass. Stock hands out a block
        that the same step's forward still has to write (a state older than the block makes such a hit
        possible); the copy then holds whatever the page held before.

        Args:
            request: A request about to be admitted with a prefix-cache hit.
            num_hit_tokens: Length of the hit.
            prefills: Prefills of this step so far, by request id.
            max_hit_length: Tokens that the hit was looked up for at most, None for all of the request's but one.
        """
        managers = [m for m in self.attention_managers if num_hit_tokens % m.block_size]
        if not managers:
            return False
        # Past `get_computed_blocks`, which would report the hit to whoever follows the cache a second time.
        most = request.num_tokens - 1 if max_hit_length is None else max_hit_length
        blocks, num_tokens, _ = self.coordinator.find_longest_cache_hit(request.block_hashes, most)
        assert num_tokens == num_hit_tokens, f"the hit of {num_hit_tokens} tokens is one of {num_tokens} now"
        return any(
            self._writes(manager, request_id, prefill, blocks[manager.kv_cache_group_id][-1], num_tokens)
            for manager in managers
            for request_id, prefill in prefills.items()
        )

    def _writes(
        self,
        manager: SingleTypeKVCacheManager,
        request_id: str,
        prefill: StepPrefill,
        block: KVCacheBlock,
        num_tokens: int,
    ) -> bool:
        """Whether a prefill writes in `block`, in this step, below the prefix of `num_tokens` tokens.

        The first block of an admission may be a copy of its own, which this step fills from the beginning.
        """
        if prefill.start >= num_tokens and not prefill.is_admission:
            return False
        written = manager.req_to_blocks.get(request_id, ())[prefill.start // manager.block_size :]
        return any(other is block for other in written)

    def withdraw_unwritten(self, request: Request) -> None:
        """Take out of the prefix cache what a request published for tokens it will not compute now.

        Call it before a request is preempted: stock lets a chunk that was allocated in the same step keep its
        entries although no forward pass will write them.
        """
        for manager in self.coordinator.single_type_managers:
            for block in manager.req_to_blocks.get(request.request_id, ()):
                if (block.block_hash_num_tokens or 0) > request.num_computed_tokens:
                    self.block_pool._maybe_evict_cached_block(block)
