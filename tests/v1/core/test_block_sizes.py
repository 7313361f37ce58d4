# SPDX-License-Identifier: Apache-2.0
"""Which block sizes keep 8K spans coalesced, and what stock's rule would make of a state: plain arithmetic."""

import pytest

from vllm.v1.core.block_sizes import (
    BlockSizes,
    boundaries_inside,
    candidates,
    fills_span,
    forms_8k_path,
    nearest_multiples,
    raised_block,
)
from vllm.v1.core.state_retention import LookupGrid, Retention


@pytest.mark.parametrize(
    ("value", "unit", "nearest"),
    [(500, 128, (384, 512)), (512, 128, (512,)), (5, 128, (128,)), (0, 128, (128,)), (-5, 512, (512,))],
)
def test_nearest_multiples(value, unit, nearest):
    assert nearest_multiples(value, unit) == nearest


@pytest.mark.parametrize(
    ("block", "boundaries", "forms"),
    [(512, 15, True), (1024, 7, True), (1536, 5, True), (2047, 4, True), (2048, 3, False), (2560, 3, False)],
)
def test_a_span_needs_a_boundary_for_every_state(block, boundaries, forms):
    assert boundaries_inside(block) == boundaries
    assert forms_8k_path(block) == forms


def test_blocks_that_divide_the_span_fill_it():
    assert [block for block in (512, 768, 1024, 1536, 2560) if fills_span(block)] == [512, 1024]


def test_candidates_are_the_fine_pairs_with_the_finest_first():
    assert candidates(512) == [(512, 512), (512, 1024), (1024, 1024)]
    assert candidates(1024) == [(1024, 1024)]
    assert candidates(2048) == []
    assert candidates(128)[0] == (128, 128)
    assert all(mamba % attention == 0 and 8192 % mamba == 0 for attention, mamba in candidates(128))


def test_a_given_size_narrows_the_candidates():
    assert candidates(512, attention=512) == [(512, 512), (512, 1024)]
    assert candidates(512, mamba=1024) == [(512, 1024), (1024, 1024)]
    assert candidates(512, attention=1024, mamba=512) == []
    assert candidates(512, mamba=2560) == []


@pytest.mark.parametrize("pair", candidates(128))
def test_every_candidate_retains_three_states_of_8k(pair: BlockSizes):
    grid = LookupGrid(pair.mamba, pair.attention, hit_alignment=pair.attention, scheduler_block=pair.mamba)
    assert len(Retention(grid).checkpoint_positions(8192)) >= 3


@pytest.mark.parametrize(
    ("state", "token", "unit", "block_size", "block"),
    [
        (1_085_440, 512, 512, 512, 2560),
        (4_341_760, 1024, 512, 512, 4608),
        (512 * 512, 512, 512, 512, 512),
        (512 * 512 + 1, 512, 512, 512, 1024),
        (1, 512, 512, 4096, 4096),
        (1_085_440, 512, 512, 64, 2560),
        (1_085_440, 512, 512, 768, 2560),
    ],
)
def test_stock_raises_a_block_until_it_holds_a_state(state, token, unit, block_size, block):
    assert raised_block(state, token, unit, block_size) == block
