# SPDX-License-Identifier: Apache-2.0
"""Where lookups of a KV cache can resume, read off vLLM's own coordinator of its groups."""

from __future__ import annotations

import math

from vllm.v1.core.boundary_attention import BoundaryAttentionManager
from vllm.v1.core.cache_groups import CacheGroups
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.state_retention import LookupGrid


def lookup_grid(coordinator: KVCacheCoordinator) -> LookupGrid:
    """Where lookups can resume.

    Args:
        coordinator: Of a scheduler, or of a layout that is only measured; it need not hold any block.
    """
    mamba, attention = CacheGroups.of(coordinator)
    (mamba_block,) = {m.block_size for m in mamba}
    (hit_alignment,) = {m.cache_hit_alignment_tokens for m in mamba}
    return LookupGrid(
        mamba_block=mamba_block,
        attention_step=math.lcm(
            *(hit_alignment if isinstance(m, BoundaryAttentionManager) else m.block_size for m in attention)
        ),
        hit_alignment=hit_alignment,
        scheduler_block=coordinator.scheduler_block_size,
        hash_lookahead=coordinator.block_pool.num_hash_lookahead_tokens,
        drop_block=bool(coordinator.drop_eagle_group_ids),
    )
