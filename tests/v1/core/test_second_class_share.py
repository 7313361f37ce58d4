"""The share moves toward whichever class is missed."""

from __future__ import annotations

import pytest

from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.core.second_class_share import Ghosts, Reach, SecondClassShare

POOL = 640


@pytest.fixture
def share() -> SecondClassShare:
    return SecondClassShare(POOL, groups=5, page=512)


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def test_it_starts_at_nothing(share):
    assert share.pages == 0


def test_a_missed_second_class_state_raises_it_by_its_tokens(share):
    share.learn(Reach(hit=0, first_class=0, all_states=8192))
    assert share.pages == POOL // 64
    share.learn(Reach(hit=4096, first_class=4096, all_states=8192))
    assert share.pages == POOL // 64 + POOL // 128


def test_a_missed_first_class_entry_lowers_it(share):
    for _ in range(4):
        share.learn(Reach(0, 0, 8192))
    share.learn(Reach(hit=0, first_class=8192, all_states=0))
    assert share.pages == 3 * POOL // 64


def test_what_both_would_have_saved_moves_nothing(share):
    share.learn(Reach(0, 4096, 4096))
    assert share.pages == 0


def test_it_stays_between_nothing_and_half_the_pool(share):
    share.learn(Reach(0, 8192, 0))
    assert share.pages == 0
    for _ in range(100):
        share.learn(Reach(0, 0, 8192))
    assert share.pages == POOL // 2


def test_it_holds_whole_states():
    share = SecondClassShare(POOL, groups=6, page=512)
    for pages in (6, 18, 30, 36):
        share.learn(Reach(0, 0, 8192))
        assert share.pages == pages


def test_an_emptied_cache_has_lost_nothing_that_could_be_missed(share):
    share.note_lost_state(name(1))
    share.note_first_class_eviction(make_block_hash_with_group_id(name(2), 0), held=0)
    share.learn(Reach(0, 0, 8192))
    share.forget()
    assert not share.remembers
    assert share.pages == POOL // 64


def test_ghosts_forget_the_oldest():
    ghosts = Ghosts(2)
    for number in (1, 2, 1, 3):
        ghosts.add(name(number))
    assert [name(number) in ghosts for number in (1, 2, 3)] == [True, False, True]
    ghosts.discard(name(1))
    assert name(1) not in ghosts


def test_first_class_entries_are_remembered_as_long_as_stock_would_have_kept_them(share):
    """Second-class states hold 200 pages: 200 evictions ago stock's cache would have had that entry still."""
    keys = [make_block_hash_with_group_id(name(number), 0) for number in range(300)]
    for key in keys:
        share.note_first_class_eviction(key, held=200)
    assert [share.was_first_class(key) for key in (keys[99], keys[100], keys[299])] == [False, True, True]


def test_a_state_that_is_kept_again_is_not_missed(share):
    share.note_lost_state(name(1))
    assert share.was_second_class(name(1))
    share.note_kept_state(name(1))
    assert not share.was_second_class(name(1))


def test_there_is_nothing_to_learn_from_until_something_went(share):
    assert not share.remembers
    share.note_lost_state(name(1))
    assert share.remembers
    share.note_kept_state(name(1))
    share.note_first_class_eviction(make_block_hash_with_group_id(name(2), 0), held=0)
    assert share.remembers
