# SPDX-License-Identifier: Apache-2.0
"""Where lookups of a KV cache can resume, read off vLLM's own coordinator of its groups."""

from __future__ import annotations

import math

from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SingleTypeKVCacheManager
from vllm.v1.core.state_retention import LookupGrid


def cacheable_managers(
    coordinator: KVCacheCoordinator,
) -> tuple[tuple[MambaManager, ...], tuple[SingleTypeKVCacheManager, ...]]:
    """The Mamba groups of a KV cache, and its other groups that have prefix-cache entries."""
    managers = coordinator.single_type_managers
    mamba = tuple(m for m in managers if isinstance(m, MambaManager))
    attention = tuple(m for m in managers if not isinstance(m, MambaManager) and m.kv_cache_spec.prefix_cacheable)
    return mamba, attention


def lookup_grid(coordinator: KVCacheCoordinator) -> LookupGrid:
    """Where lookups can resume.

    Args:
        coordinator: Of a scheduler, or of a layout that is only measured; it need not hold any block.
    """
    mamba, attention = cacheable_managers(coordinator)
    (mamba_block,) = {m.block_size for m in mamba}
    (hit_alignment,) = {m.cache_hit_alignment_tokens for m in mamba}
    return LookupGrid(
        mamba_block=mamba_block,
        attention_block=math.lcm(*(m.block_size for m in attention)),
        hit_alignment=hit_alignment,
        scheduler_block=coordinator.scheduler_block_size,
        hash_lookahead=coordinator.block_pool.num_hash_lookahead_tokens,
        drop_block=bool(coordinator.drop_eagle_group_ids),
    )
