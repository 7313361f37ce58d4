"""The free list evicts empty pages first, then second-class entries, then first-class ones by age."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.tiered_free_queue import Tier, TieredFreeQueue


def make_pool(num_blocks: int = 9) -> tuple[BlockPool, TieredFreeQueue]:
    pool = BlockPool(num_blocks, enable_caching=True, hash_block_size=16)
    return pool, TieredFreeQueue.install(pool)


def cache(pool: BlockPool, block: Any, key: int) -> None:
    pool._insert_block_hash(key.to_bytes(36, "big"), block, num_tokens=16)  # type: ignore[arg-type]


def fill(pool: BlockPool, queue: TieredFreeQueue, second_class: set[int]) -> list[int]:
    """Give every page an entry and free all in order; pages by their index in that order."""
    blocks = pool.get_new_blocks(pool.get_num_free_blocks())
    for index, block in enumerate(blocks):
        cache(pool, block, block.block_id)
        if index in second_class:
            queue.mark_second_class(block)
    pool.free_blocks(blocks)
    return [block.block_id for block in blocks]


def test_second_class_goes_before_older_first_class() -> None:
    pool, queue = make_pool()
    order = fill(pool, queue, second_class={5, 7})
    taken = [block.block_id for block in pool.get_new_blocks(4)]
    assert taken == [order[5], order[7], order[0], order[1]]


def test_without_second_class_the_order_is_stocks() -> None:
    stock, (pool, _queue) = BlockPool(9, enable_caching=True, hash_block_size=16), make_pool()
    for each in (stock, pool):
        blocks = each.get_new_blocks(8)
        for block in blocks[::2]:
            cache(each, block, block.block_id)
        each.free_blocks(blocks)
    assert [b.block_id for b in pool.get_new_blocks(8)] == [b.block_id for b in stock.get_new_blocks(8)]


def test_after_a_reset_every_free_page_is_empty_and_none_is_protected() -> None:
    pool, queue = make_pool()
    fill(pool, queue, second_class={2, 5})
    queue.share = 2
    before = [block.block_id for block in queue.get_all_free_blocks()]
    assert pool.reset_prefix_cache()
    queue.forget()
    assert queue.num_second_class == 0
    assert queue.num_free_blocks == 8
    assert [block.block_id for block in queue.get_all_free_blocks()] == before
    assert queue.admits(8)
    taken = pool.get_new_blocks(8)
    assert [block.block_id for block in taken] == before
    # Nothing of the old second class clings to the pages.
    pool.free_blocks(taken)
    assert queue.num_second_class == 0


def test_a_hit_makes_an_entry_first_class() -> None:
    pool, queue = make_pool()
    order = fill(pool, queue, second_class={2})
    assert queue.num_second_class == 1
    hit = pool.blocks[order[2]]
    pool.touch([hit])
    pool.free_blocks([hit])
    assert queue.num_second_class == 0
    assert [block.block_id for block in pool.get_new_blocks(8)][-1] == order[2]


def test_a_reused_page_is_not_second_class_any_more() -> None:
    pool, queue = make_pool()
    order = fill(pool, queue, second_class={0})
    (block,) = pool.get_new_blocks(1)
    assert block.block_id == order[0]
    cache(pool, block, 99)
    pool.free_blocks([block])
    assert queue.num_second_class == 0


def test_refresh_makes_an_entry_the_last_of_its_tier() -> None:
    pool, queue = make_pool()
    order = fill(pool, queue, second_class={0, 1})
    queue.refresh(pool.blocks[order[0]])
    queue.refresh(pool.blocks[order[2]])
    taken = [block.block_id for block in pool.get_new_blocks(8)]
    assert taken[:2] == [order[1], order[0]]
    assert taken[-1] == order[2]


@pytest.mark.parametrize("second_class, spare", [(set(), 0), ({3}, 1), ({0, 1, 2}, 3)])
def test_without_a_share_second_class_entries_take_no_first_class_page(second_class: set[int], spare: int) -> None:
    pool, queue = make_pool()
    fill(pool, queue, second_class)
    assert queue.admits(spare)
    assert not queue.admits(spare + 1)


def test_entries_dropped_in_place_are_spare() -> None:
    pool, queue = make_pool()
    order = fill(pool, queue, second_class=set())
    pool.evict_blocks({order[0], order[1], order[4]})
    assert queue.admits(2)
    assert not queue.admits(3)


def test_within_their_share_second_class_entries_push_out_the_oldest_first_class_ones() -> None:
    pool, queue = make_pool()
    order = fill(pool, queue, second_class={5})
    queue.share = 3
    assert queue.admits(2)
    with queue.for_second_class(2):
        assert [block.block_id for block in pool.get_new_blocks(2)] == order[:2]
    assert queue.share == 3


def test_beyond_their_share_second_class_entries_replace_their_oldest() -> None:
    pool, queue = make_pool()
    order = fill(pool, queue, second_class={5, 6, 7})
    queue.share = 3
    assert queue.admits(1)
    with queue.for_second_class(1):
        assert [block.block_id for block in pool.get_new_blocks(1)] == [order[5]]


def test_a_share_of_second_class_entries_outlives_first_class_ones() -> None:
    pool, queue = make_pool()
    order = fill(pool, queue, second_class={0, 1, 2})
    queue.share = 2
    taken = [block.block_id for block in pool.get_new_blocks(8)]
    assert taken == [order[0], *order[3:], order[1], order[2]]


def test_entries_that_go_are_told_of_with_their_class() -> None:
    pool, queue = make_pool()
    order = fill(pool, queue, second_class={5})
    told = []
    queue.on_eviction = lambda tier, blocks: told.append((tier, [block.block_id for block in blocks]))
    pool.get_new_blocks(3)
    assert told == [(Tier.SECOND_CLASS, [order[5]]), (Tier.FIRST_CLASS, order[:2])]


def test_it_is_installed_once_and_before_the_first_entry() -> None:
    pool, queue = make_pool()
    assert TieredFreeQueue.install(pool) is queue
    used = BlockPool(4, enable_caching=True, hash_block_size=16)
    cache(used, used.get_new_blocks(1)[0], 1)
    with pytest.raises(AssertionError, match="before the first request"):
        TieredFreeQueue.install(used)


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
            page = held[number % len(held)]
            block = pool.blocks[page]
            if action == "free":
                held.remove(page)
                pool.free_blocks([block])
                if block.block_hash is None:
                    empty.insert(0, page)
                    marked.discard(page)
                else:
                    (second if page in marked else first).append(page)
            elif block.block_hash is None:
                cache(pool, block, 1000 + key)
                if action == "second":
                    queue.mark_second_class(block)
                    marked.add(page)
        elif action in ("hit", "refresh") and second + first:
            page = (second + first)[number % len(second + first)]
            tier = second if page in second else first
            tier.remove(page)
            if action == "hit":
                pool.touch([pool.blocks[page]])
                marked.discard(page)
                held.append(page)
            else:
                queue.refresh(pool.blocks[page])
                tier.append(page)
        elif action == "evict" and second + first:
            pool.evict_blocks({(second + first)[number % len(second + first)]})
        assert [block.block_id for block in queue.get_all_free_blocks()] == empty + second + first
        assert [block.block_id for block in queue.iter_blocks_after(None)] == empty + second + first
        assert queue.num_free_blocks == len(empty + second + first)
        assert queue.num_second_class == len(second)
