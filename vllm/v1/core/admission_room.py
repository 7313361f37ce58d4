# SPDX-License-Identifier: Apache-2.0
"""Whether a KV cache has room for a query span that runs on where stock's stops."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.v1.core.cache_groups import CacheGroups
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SingleTypeKVCacheManager
from vllm.v1.request import Request


def has_room(
    manager: KVCacheManager, request: Request, others: Iterable[Request], num_lookahead_tokens: int, decoded: int
) -> bool:
    """Whether a request's whole sequence can be allocated for sure, states included, and besides what every other
    request needs: its whole sequence too, or where it decodes, what it grows by meanwhile.

    A span that runs past a stop of stock's takes blocks a step earlier than stock would. In a pool too tight for
    that, another request would wait, lose its cached prefix, or be preempted.

    Args:
        manager: The KV cache.
        request: The request whose span is longer than stock's.
        others: Requests that run or wait; looked at only until they exceed what is free.
        num_lookahead_tokens: Tokens after the sequence that `request` needs blocks for.
        decoded: Most tokens that a decoding request needs blocks for until `request` has its prompt.
    """
    free = manager.block_pool.get_num_free_blocks()
    needed = manager.watermark_blocks + _most_blocks(manager, request, request.num_tokens + num_lookahead_tokens)
    groups = CacheGroups.of(manager.coordinator)
    for other in others:
        if needed > free:
            break
        if other is request:
            continue
        if other.num_computed_tokens >= other.num_tokens - 1:
            needed += _growth(groups, other, decoded)
        else:
            needed += _most_blocks(manager, other, other.num_tokens)
    return needed <= free


def _growth(groups: CacheGroups, request: Request, num_tokens: int) -> int:
    """Blocks that `num_tokens` more tokens of a decoding request take."""
    end = request.num_computed_tokens + num_tokens
    # One group stands for all of its kind: a busy server asks this for hundreds of requests.
    mamba = groups.mamba[0]
    states = len(groups.mamba) * _columns_to_come(mamba, request, end, mamba.num_speculative_blocks)
    return states + sum(_columns_to_come(attention, request, end) for attention in groups.attention)


def _most_blocks(manager: KVCacheManager, request: Request, num_tokens: int) -> int:
    """Upper bound of the free blocks that a request's first `num_tokens` tokens still take: all of a prefix hit
    counts as evictable."""
    blocks = 0
    for group in manager.coordinator.single_type_managers:
        if isinstance(group, MambaManager):
            # Running state, hit, copy-on-write and stock's checkpoint, besides the speculative states.
            blocks += 4 + group.num_speculative_blocks
        elif not group.kv_cache_spec.prefix_cacheable:
            # Scratch, of a size that has nothing to do with tokens (the indexer's open pool: one block a request).
            blocks += group.get_num_blocks_to_allocate(request.request_id, num_tokens, (), 0, 0, num_tokens)
        else:
            blocks += _columns_to_come(group, request, num_tokens) + 1
    return blocks


def _columns_to_come(group: SingleTypeKVCacheManager, request: Request, num_tokens: int, more: int = 0) -> int:
    """Columns that a request's block table in one group lacks for `num_tokens` tokens and `more` columns."""
    columns = -(-num_tokens // group.block_size) + more
    return max(columns - len(group.req_to_blocks.get(request.request_id, ())), 0)
