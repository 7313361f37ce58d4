# SPDX-License-Identifier: Apache-2.0
"""The KV cache groups that have prefix-cache entries."""

from __future__ import annotations

from typing import NamedTuple

from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SingleTypeKVCacheManager


class CacheGroups(NamedTuple):
    """Stock's managers of the groups with prefix-cache entries.

    Attributes:
        mamba: One a Mamba group. A state has one block in each of them.
        attention: One a group of any other kind.
    """

    mamba: tuple[MambaManager, ...]
    attention: tuple[SingleTypeKVCacheManager, ...]

    @classmethod
    def of(cls, coordinator: KVCacheCoordinator) -> CacheGroups:
        """The groups of a KV cache."""
        managers = coordinator.single_type_managers
        return cls(
            tuple(m for m in managers if isinstance(m, MambaManager)),
            tuple(m for m in managers if not isinstance(m, MambaManager) and m.kv_cache_spec.prefix_cacheable),
        )

    @property
    def mamba_ids(self) -> list[int]:
        """KV cache group ids of the Mamba groups."""
        return [m.kv_cache_group_id for m in self.mamba]
