# SPDX-License-Identifier: Apache-2.0
"""The allocator's part: a block for every exported state.

Stock allocates a step's requests first, untouched. Once every request of the step has its blocks, exports take
theirs from what is left, enter the prefix cache, and go back to the free list at once: the step's forward pass
writes them, and whoever is given such a block later runs after it. So an export never holds a block, never
changes a block table, and never decides whether a request runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from vllm.v1.core import stock_guards
from vllm.v1.core.boundary_attention import BoundaryAttentionManager
from vllm.v1.core.cache_groups import CacheGroups
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.lookup_grid import lookup_grid
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.core.state_eviction import StateEviction
from vllm.v1.core.state_retention import LookupGrid, WantedState
from vllm.v1.request import Request

BlockIds = dict[int, int]
"""KV cache group id -> block id of one state."""


class CoalescingKVCacheManager(KVCacheManager):
    """`KVCacheManager` that grants blocks to exported states.

    Attributes:
        groups: The groups with prefix-cache entries.
        grid: Where lookups can resume.
        eviction: Which free blocks exported states take.
    """

    groups: CacheGroups
    grid: LookupGrid
    eviction: StateEviction
    _exported: dict[str, list[tuple[KVCacheBlock, object]]]
    _num_lookahead_tokens: int
    _shortened: tuple[str, int] | None

    @classmethod
    def adopt(cls, manager: KVCacheManager, num_lookahead_tokens: int = 0) -> CoalescingKVCacheManager:
        """Turn the manager that stock's scheduler has just built into this class, in place.

        In place, because connectors and metrics already hold the object.

        Args:
            manager: Stock's, before its first request.
            num_lookahead_tokens: Tokens after a request's own that the scheduler allocates blocks for.
        """
        assert type(manager) is KVCacheManager, f"cannot adopt a {type(manager).__name__}"
        manager.__class__ = cls
        adopted = cast(CoalescingKVCacheManager, manager)
        BoundaryAttentionManager.adopt_all(adopted.coordinator)
        adopted.groups = CacheGroups.of(adopted.coordinator)
        adopted.grid = lookup_grid(adopted.coordinator)
        adopted.eviction = StateEviction(adopted.block_pool, adopted.groups, adopted.grid)
        adopted._exported = {}
        adopted._num_lookahead_tokens = num_lookahead_tokens
        adopted._shortened = None
        return adopted

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int]:
        """Stock's lookup; but where nothing except the block for a copy is lacking, a hit that needs no copy.

        A hit inside an attention block takes one block more than a hit at its beginning until the copy is made. A
        request must not wait for that block where it could run without.
        """
        self._shortened = None
        found = super().get_computed_blocks(request, max_cache_hit_length)
        copies = sum(found[1] % attention.block_size > 0 for attention in self.groups.attention)
        if copies and 0 < self._lacking(request, found) <= copies:
            limit = min(found[1] // attention.block_size * attention.block_size for attention in self.groups.attention)
            shorter = super().get_computed_blocks(request, limit)
            if self._lacking(request, shorter) <= 0:
                self._shortened = (request.request_id, limit)
                return shorter
        return found

    def lookup_limit(self, request: Request, limit: int | None) -> int | None:
        """Tokens that the last lookup of `request`, asked for `limit` at most, has looked up at most."""
        if self._shortened is not None and self._shortened[0] == request.request_id:
            return self._shortened[1]
        return limit

    def _lacking(self, request: Request, found: tuple[KVCacheBlocks, int, int]) -> int:
        """How many more free blocks a request's whole sequence takes after a hit than there are."""
        blocks, num_hit_tokens, _ = found
        num_tokens = min(request.num_tokens + self._num_lookahead_tokens, self.max_model_len)
        needed = self.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=num_tokens,
            new_computed_blocks=blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=num_hit_tokens,
            num_local_computed_tokens=num_hit_tokens,
            num_tokens_main_model=request.num_tokens,
            apply_admission_cap=True,
            prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
        )
        return needed + self.watermark_blocks - self.block_pool.get_num_free_blocks()

    def stock_checkpoint(self, request: Request) -> tuple[int, BlockIds] | None:
        """The state that stock's allocation of this step exports inside the request's query, if it keeps it.

        Returns:
            Its position, and its block in each Mamba group, or None. Its block is in the block table already.
        """
        request_id = request.request_id
        found = {m.kv_cache_group_id: m._checkpoints.get(request_id) for m in self.groups.mamba}
        checkpoints = set(found.values())
        assert len(checkpoints) == 1, f"Mamba groups differ in request {request_id}'s checkpoint: {found}"
        checkpoint = checkpoints.pop()
        if checkpoint is None:
            return None
        position, column = checkpoint
        blocks = {m.kv_cache_group_id: m.req_to_blocks[request_id][column] for m in self.groups.mamba}
        # Under sparse retention stock drops the entries of most chunks' checkpoints again.
        if any(block.block_hash_num_tokens != position for block in blocks.values()):
            return None
        return position, {group: block.block_id for group, block in blocks.items()}

    def grant(self, request: Request, wanted: Sequence[WantedState]) -> tuple[dict[int, BlockIds], list[KVCacheBlock]]:
        """Give a block in every Mamba group to each wanted state that can have one, and publish it.

        Call it once all of a step's requests are allocated, for a request that the step runs.

        Args:
            request: A request scheduled in this step.
            wanted: States to export, the most wanted first.

        Returns:
            The granted positions with their block ids, and the blocks, in use, for the caller to free in this
            order. A state that is cached already, or can have no block, is not among them.
        """
        granted: dict[int, BlockIds] = {}
        blocks_in_use: list[KVCacheBlock] = []
        for state in wanted:
            name = self.block_pool._get_partial_block_hash(request, state.position)
            if self.block_pool.get_cached_block(name, self.groups.mamba_ids) is not None:
                continue
            blocks = self.eviction.take_blocks(state, name)
            if blocks is None:
                continue
            for manager, block in zip(self.groups.mamba, blocks, strict=True):
                self._publish(request, manager, block, state)
            granted[state.position] = {
                m.kv_cache_group_id: block.block_id for m, block in zip(self.groups.mamba, blocks, strict=True)
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
            self.eviction.forget_request(request)
        for block, block_hash in self._exported.pop(request.request_id, ()):
            if block.ref_cnt == 0 and block.block_hash == block_hash:
                self.eviction.refresh(block)

    def retain_end_state(self, request: Request, state: WantedState) -> None:
        """Publish the running state that a request's query leaves at its end, if its block holds just that.

        Stock does so under dense retention, and under sparse retention for few boundaries only. A state inside a
        block is overwritten there by the next query.
        """
        for manager in self.groups.mamba:
            blocks, rest = divmod(state.position, manager.block_size)
            if rest:
                continue
            block = manager.req_to_blocks[request.request_id][blocks - 1]
            if not block.is_null and block.block_hash is None:
                self._publish(request, manager, block, state)

    def _publish(self, request: Request, manager: MambaManager, block: KVCacheBlock, state: WantedState) -> None:
        self.block_pool.cache_partial_block(
            request=request,
            block=block,
            num_tokens=state.position,
            kv_cache_group_id=manager.kv_cache_group_id,
            block_size=manager.block_size,
        )
        self.eviction.note_published(block, state)

    def learn_from(self, request: Request, num_hit_tokens: int) -> None:
        """Learn from what a request finds in the cache, before it is given blocks of its own."""
        if self.prefix_cache_lookup_enabled(request):
            self.eviction.learn_from(request, num_hit_tokens)

    def forget_dropped_steps(self) -> None:
        """Take every entry out of the prefix cache: steps that were scheduled may never have run."""
        stock_guards.forget_dropped_steps(self.block_pool)
        self.eviction.forget_entries()

    def reset_prefix_cache(self) -> bool:
        done = super().reset_prefix_cache()
        if done:
            self.eviction.forget_entries()
        return done
