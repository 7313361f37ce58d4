# SPDX-License-Identifier: Apache-2.0
"""What the tests of this folder share: the worker made of labels, and looks into the prefix cache."""

from __future__ import annotations

import pytest

from tests.invariants.pool import entries
from tests.v1.core.labels import Fault
from tests.v1.core.shadow_worker import ShadowWorker
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.request import Request
from vllm_kda_prefill.planning import Engine


def retained(engine: Engine, request: Request) -> list[int]:
    """Token counts of `request`'s prefix whose state is cached in every Mamba group."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    groups = [m.kv_cache_group_id for m in managers if isinstance(m, MambaManager)]
    return [
        (index + 1) * pool.hash_block_size
        for index, block_hash in enumerate(request.block_hashes)
        if pool.get_cached_block(block_hash, groups)
    ]


class Tools:
    """The helpers of this folder."""

    ShadowWorker = ShadowWorker
    Fault = Fault
    entries = staticmethod(entries)
    retained = staticmethod(retained)


@pytest.fixture(scope="session")
def states() -> Tools:
    """Helpers that look into blocks and entries."""
    return Tools()
