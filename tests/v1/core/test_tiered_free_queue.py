# SPDX-License-Identifier: Apache-2.0
"""The free list evicts blocks without entries first, then probationary entries, then protected ones by age."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.probationary_quota import ProbationaryQuota
from vllm.v1.core.tiered_free_queue import TieredFreeQueue


def quota_of(num_blocks: int) -> ProbationaryQuota:
    return ProbationaryQuota(num_blocks, num_groups=1, mamba_block=16, state_group=1)


def make_pool(num_blocks: int = 9) -> tuple[BlockPool, TieredFreeQueue]:
    pool = BlockPool(num_blocks, enable_caching=True, hash_block_size=16)
    return pool, TieredFreeQueue.install(pool, quota_of(num_blocks))


def cache(pool: BlockPool, block: Any, key: int) -> None:
    pool._insert_block_hash(key.to_bytes(36, "big"), block, num_tokens=16)  # type: ignore[arg-type]


class Recorder:
    """A quota that writes down what it is told of."""

    def __init__(self, told: list[Any]) -> None:
        self.told = told
        self.blocks = 0

    def note_protected_evictions(self, blocks: list[KVCacheBlock], held: int) -> None:
        self.told.append(("protected", [block.block_id for block in blocks], held))

    def note_probationary_evictions(self, blocks: list[KVCacheBlock]) -> None:
        self.told.append(("probationary", [block.block_id for block in blocks]))


def fill(pool: BlockPool, queue: TieredFreeQueue, probationary: set[int]) -> list[int]:
    """Give every block an entry and free all in order; block ids by their index in that order."""
    blocks = pool.get_new_blocks(pool.get_num_free_blocks())
    for index, block in enumerate(blocks):
        cache(pool, block, block.block_id)
        if index in probationary:
            queue.mark_probationary(block)
    pool.free_blocks(blocks)
    return [block.block_id for block in blocks]


def test_probationary_goes_before_older_protected() -> None:
    pool, queue = make_pool()
    order = fill(pool, queue, probationary={5, 7})
    taken = [block.block_id for block in pool.get_new_blocks(4)]
    assert taken == [order[5], order[7], order[0], order[1]]


def test_without_probationary_entries_the_order_is_stocks() -> None:
    stock, (pool, _queue) = BlockPool(9, enable_caching=True, hash_block_size=16), make_pool()
    for each in (stock, pool):
        blocks = each.get_new_blocks(8)
        for block in blocks[::2]:
            cache(each, block, block.block_id)
        each.free_blocks(blocks)
    assert [b.block_id for b in pool.get_new_blocks(8)] == [b.block_id for b in stock.get_new_blocks(8)]


def test_after_a_reset_every_free_block_is_empty() -> None:
    pool, queue = make_pool()
    fill(pool, queue, probationary={2, 5})
    queue.quota.blocks = 2
    before = [block.block_id for block in queue.get_all_free_blocks()]
    assert pool.reset_prefix_cache()
    queue.forget()
    assert queue.num_probationary == 0
    assert queue.num_free_blocks == 8
    assert [block.block_id for block in queue.get_all_free_blocks()] == before
    assert queue.make_way(8)
    taken = pool.get_new_blocks(8)
    assert [block.block_id for block in taken] == before
    # No old mark clings to the blocks.
    pool.free_blocks(taken)
    assert queue.num_probationary == 0


def test_after_all_entries_are_dropped_no_mark_is_left() -> None:
    pool, queue = make_pool()
    order = fill(pool, queue, probationary={2, 5})
    in_use = pool.blocks[order[5]]
    pool.touch([in_use])
    queue.mark_probationary(in_use)
    pool.evict_blocks({block.block_id for block in pool.blocks})
    queue.forget()
    pool.free_blocks([in_use])
    assert queue.num_probationary == 0


def test_a_hit_makes_an_entry_protected() -> None:
    pool, queue = make_pool()
    order = fill(pool, queue, probationary={2})
    assert queue.num_probationary == 1
    hit = pool.blocks[order[2]]
    pool.touch([hit])
    pool.free_blocks([hit])
    assert queue.num_probationary == 0
    assert [block.block_id for block in pool.get_new_blocks(8)][-1] == order[2]


def test_a_reused_block_is_not_probationary_any_more() -> None:
    pool, queue = make_pool()
    order = fill(pool, queue, probationary={0})
    (block,) = pool.get_new_blocks(1)
    assert block.block_id == order[0]
    cache(pool, block, 99)
    pool.free_blocks([block])
    assert queue.num_probationary == 0


def test_refresh_makes_an_entry_the_last_of_its_tier() -> None:
    pool, queue = make_pool()
    order = fill(pool, queue, probationary={0, 1})
    queue.refresh(pool.blocks[order[0]])
    queue.refresh(pool.blocks[order[2]])
    taken = [block.block_id for block in pool.get_new_blocks(8)]
    assert taken[:2] == [order[1], order[0]]
    assert taken[-1] == order[2]


@pytest.mark.parametrize("probationary, spare", [(set(), 0), ({3}, 1), ({0, 1, 2}, 3)])
def test_without_a_quota_no_protected_entry_makes_way(probationary: set[int], spare: int) -> None:
    pool, queue = make_pool()
    fill(pool, queue, probationary)
    assert queue.make_way(spare)
    assert not queue.make_way(spare + 1)


def test_entries_dropped_in_place_are_spare() -> None:
    pool, queue = make_pool()
    order = fill(pool, queue, probationary=set())
    pool.evict_blocks({order[0], order[1], order[4]})
    assert queue.make_way(2)
    assert not queue.make_way(3)


def test_within_the_quota_the_oldest_protected_entries_make_way() -> None:
    pool, queue = make_pool()
    order = fill(pool, queue, probationary={5})
    queue.quota.blocks = 3
    assert queue.make_way(2)
    assert [block.block_id for block in pool.get_new_blocks(2)] == order[:2]
    assert queue.num_probationary == 1


def test_beyond_the_quota_the_oldest_probationary_makes_way() -> None:
    pool, queue = make_pool()
    order = fill(pool, queue, probationary={5, 6, 7})
    queue.quota.blocks = 3
    assert queue.make_way(1)
    assert [block.block_id for block in pool.get_new_blocks(1)] == [order[5]]
    assert queue.num_probationary == 2


def test_entries_within_the_quota_outlive_protected_ones() -> None:
    pool, queue = make_pool()
    order = fill(pool, queue, probationary={0, 1, 2})
    queue.quota.blocks = 2
    taken = [block.block_id for block in pool.get_new_blocks(8)]
    assert taken == [order[0], *order[3:], order[1], order[2]]


def test_the_quota_is_told_of_entries_that_go() -> None:
    pool, queue = make_pool()
    order = fill(pool, queue, probationary={5})
    told: list[Any] = []
    queue.quota = Recorder(told)  # type: ignore[assignment]
    pool.get_new_blocks(3)
    assert told == [("probationary", [order[5]]), ("protected", order[:2], 0)]


def test_what_makes_way_is_told_of_and_goes_next() -> None:
    pool, queue = make_pool()
    order = fill(pool, queue, probationary={5, 6})
    told: list[Any] = []
    queue.quota = Recorder(told)  # type: ignore[assignment]
    queue.quota.blocks = 3
    assert queue.make_way(1)
    assert told == [("protected", order[:1], 2)]
    assert not queue.make_way(7)
    assert [block.block_id for block in pool.get_new_blocks(1)] == order[:1]
    assert len(told) == 1


def test_it_is_installed_once_and_before_the_first_entry() -> None:
    pool, queue = make_pool()
    assert vars(pool)["free_block_queue"] is queue
    with pytest.raises(AssertionError, match="replaced once"):
        TieredFreeQueue.install(pool, queue.quota)
    used = BlockPool(4, enable_caching=True, hash_block_size=16)
    cache(used, used.get_new_blocks(1)[0], 1)
    with pytest.raises(AssertionError, match="before the first request"):
        TieredFreeQueue.install(used, quota_of(4))


def test_more_than_free_is_refused_and_takes_nothing() -> None:
    _pool, queue = make_pool(4)
    with pytest.raises(ValueError, match="4 free blocks asked for, 3 are left"):
        queue.popleft_n(4)
    assert queue.num_free_blocks == 3


@given(st.lists(st.tuples(st.sampled_from("take free cache second hit evict refresh".split()), st.integers(0, 7))))
@settings(derandomize=True, max_examples=200)
def test_any_sequence_keeps_counts_and_order(actions: list[tuple[str, int]]) -> None:
    """A model of three plain lists agrees with the queue after every action."""
    pool, queue = make_pool()
    empty, second, first = [block.block_id for block in pool.blocks[1:]], list[int](), list[int]()
    held: list[int] = []
    marked: set[int] = set()
    for key, (action, number) in enumerate(actions):
        if action == "take" and empty + second + first:
            (block,) = pool.get_new_blocks(1)
            source = empty or second or first
            assert block.block_id == source.pop(0)
            held.append(block.block_id)
            marked.discard(block.block_id)
        elif action in ("free", "cache", "second") and held:
            block_id = held[number % len(held)]
            block = pool.blocks[block_id]
            if action == "free":
                held.remove(block_id)
                pool.free_blocks([block])
                if block.block_hash is None:
                    empty.insert(0, block_id)
                    marked.discard(block_id)
                else:
                    (second if block_id in marked else first).append(block_id)
            elif block.block_hash is None:
                cache(pool, block, 1000 + key)
                if action == "second":
                    queue.mark_probationary(block)
                    marked.add(block_id)
        elif action in ("hit", "refresh") and second + first:
            block_id = (second + first)[number % len(second + first)]
            tier = second if block_id in second else first
            tier.remove(block_id)
            if action == "hit":
                pool.touch([pool.blocks[block_id]])
                marked.discard(block_id)
                held.append(block_id)
            else:
                queue.refresh(pool.blocks[block_id])
                tier.append(block_id)
        elif action == "evict" and second + first:
            pool.evict_blocks({(second + first)[number % len(second + first)]})
        assert [block.block_id for block in queue.get_all_free_blocks()] == empty + second + first
        assert [block.block_id for block in queue.iter_blocks_after(None)] == empty + second + first
        assert queue.num_free_blocks == len(empty + second + first)
        assert queue.num_probationary == len(second)
