# SPDX-License-Identifier: Apache-2.0
"""Full attention that a lookup can leave at every Mamba block's boundary, also inside an attention block.

Under DCP an attention block spans several Mamba blocks, and stock caches it under the hash of its end and of the
prompt's tail. What precedes a boundary in the block depends on the prefix alone, so here the block gets the boundary's
hash as well: one more name of the same block, in stock's own table of names. A hit there copies the block before it
writes on, as stock does after a hit of the tail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager
from vllm.v1.request import Request


class BoundaryAttentionManager(FullAttentionManager):
    """`FullAttentionManager` whose blocks are also cached under the boundaries of Mamba blocks inside them.

    Names come and go with stock's: they are given where stock caches a request's blocks, for tokens as final as
    those of a full block, and the pool drops all names of a block at once.

    Attributes:
        boundary_step: Tokens between two boundaries: whole Mamba blocks that hits are aligned to.
        boundary_proof: Tokens past a boundary that its name covers, for a lookup that gives its last unit back.
    """

    boundary_step: int
    boundary_proof: int
    _named: dict[str, int]

    @classmethod
    def adopt_all(cls, coordinator: KVCacheCoordinator) -> None:
        """Turn the full-attention managers whose blocks are wider than what hits are aligned to into this class."""
        managers = coordinator.single_type_managers
        (mamba_block,) = {m.block_size for m in managers if isinstance(m, MambaManager)}
        for manager in managers:
            alignment = manager.cache_hit_alignment_tokens
            if type(manager) is FullAttentionManager and alignment < manager.block_size:
                manager.__class__ = cls
                assert isinstance(manager, cls)
                manager.boundary_step = math.lcm(mamba_block, alignment)
                manager.boundary_proof = alignment if coordinator.drop_eagle_group_ids else 0
                manager._named = {}

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        first = self.num_cached_block.get(request.request_id, 0)
        super().cache_blocks(request, num_tokens, retention_interval, replay_boundaries=replay_boundaries)
        unit = self.block_pool.hash_block_size
        num_tokens = self._nameable(request, num_tokens)
        hashes = min(num_tokens // unit, len(request.block_hashes))
        # Most calls are a decode's, between two hashes.
        if hashes > self._named.get(request.request_id, 0):
            self._named[request.request_id] = hashes
            self._name_boundaries(request, first, hashes * unit)
            # A deeper name than the tail's has taken that one off the block.
            self._cache_partial_tail_block(request, num_tokens)

    def _nameable(self, request: Request, num_tokens: int) -> int:
        """Of `num_tokens` tokens, those that may be copied in this step: not what a decode writes in it.

        What a prefill writes in the step, guard 1 keeps from being copied.
        """
        is_prefill = request.num_computed_tokens < request.num_prompt_tokens
        return num_tokens if is_prefill else min(num_tokens, request.num_computed_tokens)

    def _name_boundaries(self, request: Request, first: int, num_tokens: int) -> None:
        """Give their boundaries' names to the blocks from column `first` on, as far as `num_tokens` tokens."""
        # The deepest first: the pool drops a block's names for a deeper one, which tells how far its tokens are cached.
        for position in reversed(self.boundary_names(first * self.block_size, num_tokens)):
            block: KVCacheBlock = self.req_to_blocks[request.request_id][position // self.block_size]
            self.block_pool.cache_partial_block(
                request=request,
                block=block,
                num_tokens=position,
                kv_cache_group_id=self.kv_cache_group_id,
                block_size=self.block_size,
            )

    def boundary_names(self, start: int, end: int) -> list[int]:
        """Token counts in `(start, end]` inside a block that a block is cached under, in ascending order."""
        step, proof = self.boundary_step, self.boundary_proof
        first = (start - proof) // step * step + step + proof
        return [position for position in range(first, end + 1, step) if position % self.block_size]

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self._named.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)
