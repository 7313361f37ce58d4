# SPDX-License-Identifier: Apache-2.0
"""Guards against faults of stock vLLM 0.33.0, one function a fault.

Each fault is a numbered section of docs/upstream.md with a minimal case, and each guard goes away with the fix there.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

from vllm.config import CacheConfig
from vllm.kda_prefill_variables import GATE, SPLIT_TARGET
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.cache_groups import CacheGroups
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.core.state_retention import LookupGrid
from vllm.v1.core.step_prefill import StepPrefill
from vllm.v1.request import Request


def copies_unwritten_block(
    manager: KVCacheManager,
    request: Request,
    num_hit_tokens: int,
    prefills: Mapping[str, StepPrefill],
    max_hit_length: int | None = None,
) -> bool:
    """Whether admitting `request` would copy an attention block that this step still has to write (fault 1).

    A partial hit copies the hit's last attention block before the forward pass. Stock hands out a block that the
    same step's forward pass still has to write (a state older than the block makes such a hit possible); the copy
    then holds whatever the block held before.

    Args:
        manager: The KV cache.
        request: A request about to be admitted with a prefix-cache hit.
        num_hit_tokens: Length of the hit.
        prefills: Prefills of this step so far, by request id.
        max_hit_length: Tokens that the hit was looked up for at most, None for all of the request's but one.
    """
    groups = [group for group in CacheGroups.of(manager.coordinator).attention if num_hit_tokens % group.block_size]
    if not groups:
        return False
    # Past `get_computed_blocks`, which would report the hit to whoever follows the cache a second time.
    most = request.num_tokens - 1 if max_hit_length is None else max_hit_length
    blocks, num_tokens, _ = manager.coordinator.find_longest_cache_hit(request.block_hashes, most)
    assert num_tokens == num_hit_tokens, f"the hit of {num_hit_tokens} tokens is one of {num_tokens} now"
    return any(
        _writes(group, request_id, prefill, blocks[group.kv_cache_group_id][-1], num_tokens)
        for group in groups
        for request_id, prefill in prefills.items()
    )


def _writes(
    group: SingleTypeKVCacheManager, request_id: str, prefill: StepPrefill, block: KVCacheBlock, num_tokens: int
) -> bool:
    """Whether a prefill writes in `block`, in this step, below the prefix of `num_tokens` tokens.

    The first block of an admission may be a copy of its own, which this step fills from the beginning.
    """
    if prefill.start >= num_tokens and not prefill.is_admission:
        return False
    written = group.req_to_blocks.get(request_id, ())[prefill.start // group.block_size :]
    return any(other is block for other in written)


def withdraw_unwritten(manager: KVCacheManager, request: Request) -> None:
    """Take out of the prefix cache what a request published for tokens it will not compute now (fault 2).

    Call it before a request is preempted: stock lets a chunk that was allocated in the same step keep its entries
    although no forward pass will write them.
    """
    for group in manager.coordinator.single_type_managers:
        for block in group.req_to_blocks.get(request.request_id, ()):
            if (block.block_hash_num_tokens or 0) > request.num_computed_tokens:
                manager.block_pool._maybe_evict_cached_block(block)


def end_with_the_block(start: int, num_tokens: int, mamba_block: int) -> int:
    """Tokens of a chunk of `num_tokens` from `start` on that may run, if it resumes inside a Mamba block (fault 3).

    Such a chunk fills its block first. Stock runs on where it exports the prompt's tail, and then publishes the
    state it resumed from as the one at the block's end.
    """
    inside = start % mamba_block
    return min(num_tokens, mamba_block - inside) if inside else num_tokens


def with_mamba_block_size(cache_config: CacheConfig, mamba_block: int) -> CacheConfig:
    """A copy of the configuration that names the Mamba block, for the scheduler alone (fault 4).

    Stock ends chunks on multiples of the configuration's block size, which is the smallest of all groups, and takes
    it for the Mamba block. Where that is wider, chunks would end inside it and be published as its end.
    """
    copied = copy.copy(cache_config)
    copied.block_size = mamba_block
    return copied


def is_padded_prompt(request: Request, start: int, num_new_tokens: int) -> bool:
    """Whether a prompt of one token is padded with placeholder drafts (fault 5).

    With no state before it the worker runs such a row as a prefill, which keeps the state after the placeholders.
    The request's own tokens alone are right.
    """
    return start == 0 and num_new_tokens > request.num_tokens


def check_hit_alignment(grid: LookupGrid) -> None:
    """Refuse Mamba blocks that are smaller than what prefix-cache hits are aligned to (fault 6).

    Stock then exports a prompt's last state into a block that a later boundary belongs to, and with asynchronous
    scheduling publishes it a second time, as that boundary's.

    Raises:
        ValueError: They are smaller; the message names both sizes.
    """
    if grid.hit_alignment > grid.mamba_block:
        raise ValueError(
            f"Mamba blocks of {grid.mamba_block} tokens are smaller than the {grid.hit_alignment} tokens that "
            f"prefix-cache hits are aligned to: set {SPLIT_TARGET} to {grid.mamba_block} or a divisor of it, or serve "
            f"with {GATE}=0"
        )


def forget_dropped_steps(block_pool: BlockPool) -> None:
    """Take every entry out of the prefix cache, for steps that were scheduled may never have run (fault 8).

    Blocks enter the prefix cache while a step is scheduled. The engine core hands each step to the executor at once,
    and steps run in order, so an abort in between does no harm: the step still writes them. The one exception is fault
    tolerance (`--enable-fault-tolerance`): when a step raises, the engine core aborts every request, drops the steps in
    flight and serves on. What they were to write, and whatever a failing rank computed before, is still in the cache.

    Args:
        block_pool: Its entries are dropped, also those of blocks in use. No block is freed.
    """
    block_pool.evict_blocks({block.block_id for block in block_pool.blocks if block.block_hash is not None})
