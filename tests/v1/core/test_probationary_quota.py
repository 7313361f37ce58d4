# SPDX-License-Identifier: Apache-2.0
"""The quota moves toward whichever entries are missed."""

from __future__ import annotations

import pytest

from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.core.probationary_quota import Ghosts, ProbationaryQuota, Reach

POOL = 640


@pytest.fixture
def quota() -> ProbationaryQuota:
    return ProbationaryQuota(POOL, num_groups=5, mamba_block=512, state_group=1)


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def block_with(key: BlockHashWithGroupId) -> KVCacheBlock:
    block = KVCacheBlock(1)
    block.set_block_hash(key, 16)
    return block


def test_it_starts_at_nothing(quota):
    assert quota.blocks == 0


def test_a_missed_probationary_state_raises_it_by_its_tokens(quota):
    quota.learn(Reach(hit=0, protected=0, probationary=8192))
    assert quota.blocks == POOL // 64
    quota.learn(Reach(hit=4096, protected=4096, probationary=8192))
    assert quota.blocks == POOL // 64 + POOL // 128


def test_a_missed_protected_entry_lowers_it(quota):
    for _ in range(4):
        quota.learn(Reach(0, 0, 8192))
    quota.learn(Reach(hit=0, protected=8192, probationary=0))
    assert quota.blocks == 3 * POOL // 64


def test_what_both_would_have_saved_moves_nothing(quota):
    quota.learn(Reach(0, 4096, 4096))
    assert quota.blocks == 0


def test_it_stays_between_nothing_and_half_the_pool(quota):
    quota.learn(Reach(0, 8192, 0))
    assert quota.blocks == 0
    for _ in range(100):
        quota.learn(Reach(0, 0, 8192))
    assert quota.blocks == POOL // 2


def test_it_holds_whole_states():
    quota = ProbationaryQuota(POOL, num_groups=6, mamba_block=512, state_group=1)
    for blocks in (6, 18, 30, 36):
        quota.learn(Reach(0, 0, 8192))
        assert quota.blocks == blocks


def test_an_emptied_cache_has_lost_nothing(quota):
    quota.note_lost_state(name(1))
    quota.note_protected_evictions([block_with(make_block_hash_with_group_id(name(2), 0))], held=0)
    quota.learn(Reach(0, 0, 8192))
    quota.forget()
    assert not quota.remembers
    assert quota.blocks == POOL // 64


def test_ghosts_forget_the_oldest():
    ghosts = Ghosts(2)
    for number in (1, 2, 1, 3):
        ghosts.add(name(number))
    assert [name(number) in ghosts for number in (1, 2, 3)] == [True, False, True]
    ghosts.discard(name(1))
    assert name(1) not in ghosts


def test_protected_entries_are_remembered_as_long_as_by_stock(quota):
    """Probationary states hold 200 blocks: 200 evictions ago stock's cache would have had that entry still."""
    keys = [make_block_hash_with_group_id(name(number), 0) for number in range(300)]
    for key in keys:
        quota.note_protected_evictions([block_with(key)], held=200)
    assert [quota.was_protected(key) for key in (keys[99], keys[100], keys[299])] == [False, True, True]


def test_a_state_that_is_kept_again_is_not_missed(quota):
    quota.note_lost_state(name(1))
    assert quota.was_probationary(name(1))
    quota.note_kept_state(name(1))
    assert not quota.was_probationary(name(1))


def test_there_is_nothing_to_learn_from_until_something_went(quota):
    assert not quota.remembers
    quota.note_lost_state(name(1))
    assert quota.remembers
    quota.note_kept_state(name(1))
    quota.note_protected_evictions([block_with(make_block_hash_with_group_id(name(2), 0))], held=0)
    assert quota.remembers


def test_one_groups_entry_stands_for_the_whole_state(quota):
    for group in (0, 1, 2):
        quota.note_probationary_evictions([block_with(make_block_hash_with_group_id(name(group), group))])
    assert [quota.was_probationary(name(group)) for group in (0, 1, 2)] == [False, True, False]
