# SPDX-License-Identifier: Apache-2.0
"""A KV cache of labels beside vLLM's scheduler, and the check of the prefix cache against it."""

from __future__ import annotations

import random

from tests.invariants.pool import check_nothing_leaked, entries
from tests.v1.core.labels import Fault, Row
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.request import Request
from vllm_kda_prefill.planning import Engine


class ShadowMemory:
    """What blocks hold, and the check of the prefix cache against it.

    Attributes:
        state: Block id -> label of the state in it.
        kv: Block id -> offset in the block -> label of the token's KV.
        rows: What a worker knows of each request.
    """

    def __init__(self, engine: Engine, seed: int = 0, checked: bool = True) -> None:
        self.engine = engine
        self.scheduler: Scheduler = engine.scheduler
        self.checked = checked
        self.rng = random.Random(seed)
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        self.managers = managers
        self.mamba = [g for g, manager in enumerate(managers) if isinstance(manager, MambaManager)]
        cacheable = {g for g, manager in enumerate(managers) if manager.kv_cache_spec.prefix_cacheable}
        self.attention = sorted(cacheable - set(self.mamba))
        self.state: dict[int, int] = {}
        self.kv: dict[int, dict[int, int]] = {}
        self.rows: dict[str, Row] = {}
        self.requests: dict[str, Request] = {}
        self.expected: dict[bytes, tuple[int, str]] = {}
        self._reference: dict[str, Row] = {}
        self._known_hashes: dict[str, int] = {}

    def _promises(self) -> None:
        """Learn what the hashes of all requests stand for."""
        pool = self.scheduler.kv_cache_manager.block_pool
        for request_id, request in self.requests.items():
            known = self._known_hashes.get(request_id, 0)
            for index in range(known, len(request.block_hashes)):
                promise = ((index + 1) * pool.hash_block_size, request_id)
                self.expected.setdefault(bytes(request.block_hashes[index]), promise)
            self._known_hashes[request_id] = len(request.block_hashes)

    def promised(self, block_hash: bytes) -> tuple[int, Row]:
        """Token count and tokens of a hash."""
        num_tokens, request_id = self.expected[block_hash]
        request = self.requests[request_id]
        row = self._reference.get(request_id)
        if row is None or len(row.tokens) < num_tokens:
            row = self._reference[request_id] = Row([], 0, 0, list(request.all_token_ids))
        return num_tokens, row

    def check_cache(self) -> None:
        """Every entry of the prefix cache leads to a block with what its hash promises."""
        self._promises()
        manager = self.scheduler.kv_cache_manager
        for key, block in list(entries(manager.block_pool)):
            group = get_group_id(key)
            num_tokens, row = self.promised(bytes(get_block_hash(key)))
            if group in self.mamba:
                if self.state.get(block.block_id) != row.label(num_tokens):
                    raise Fault(f"block {block.block_id} is cached as the state after {num_tokens} tokens; it is not")
            else:
                size = self.managers[group].block_size
                slots = self.kv.get(block.block_id, {})
                for position in range((num_tokens - 1) // size * size, num_tokens):
                    if slots.get(position % size) != row.label(position + 1):
                        raise Fault(f"block {block.block_id} is cached up to {num_tokens}; token {position} is wrong")

    def check_all_returned(self) -> None:
        """No request is left and every block is free."""
        check_nothing_leaked(self.scheduler)
