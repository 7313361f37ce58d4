"""Which page sizes keep 8K spans coalesced, and what stock's rule would make of a state: plain arithmetic."""

import pytest

from vllm.v1.core.split_layout_planning import (
    PageSizes,
    boundaries_inside,
    candidates,
    fills_span,
    forms_8k_path,
    nearest_multiples,
    raised_page,
)
from vllm.v1.core.state_retention import LookupGrid, Retention


@pytest.mark.parametrize(
    ("value", "unit", "nearest"),
    [(500, 128, (384, 512)), (512, 128, (512,)), (5, 128, (128,)), (0, 128, (128,)), (-5, 512, (512,))],
)
def test_nearest_multiples_are_positive_and_next_to_the_value(value, unit, nearest):
    assert nearest_multiples(value, unit) == nearest


@pytest.mark.parametrize(
    ("page", "boundaries", "forms"),
    [(512, 15, True), (1024, 7, True), (1536, 5, True), (2047, 4, True), (2048, 3, False), (2560, 3, False)],
)
def test_a_span_needs_a_boundary_for_every_state_a_query_can_export(page, boundaries, forms):
    assert boundaries_inside(page) == boundaries
    assert forms_8k_path(page) == forms


def test_pages_that_do_not_divide_the_span_leave_a_part_of_the_budget():
    assert [page for page in (512, 768, 1024, 1536, 2560) if fills_span(page)] == [512, 1024]


def test_candidates_are_the_fine_pairs_with_the_finest_first():
    assert candidates(512) == [(512, 512), (512, 1024), (1024, 1024)]
    assert candidates(1024) == [(1024, 1024)]
    assert candidates(2048) == []
    assert candidates(128)[0] == (128, 128)
    assert all(mamba % target == 0 and 8192 % mamba == 0 for target, mamba in candidates(128))


def test_a_given_size_narrows_the_candidates():
    assert candidates(512, target=512) == [(512, 512), (512, 1024)]
    assert candidates(512, mamba=1024) == [(512, 1024), (1024, 1024)]
    assert candidates(512, target=1024, mamba=512) == []
    assert candidates(512, mamba=2560) == []


@pytest.mark.parametrize("pair", candidates(128))
def test_every_candidate_retains_at_least_three_states_of_an_8k_prompt(pair: PageSizes):
    grid = LookupGrid(pair.mamba, pair.target, hit_alignment=pair.target, scheduler_block=pair.mamba)
    assert len(Retention(grid).checkpoint_positions(8192)) >= 3


@pytest.mark.parametrize(
    ("state", "token", "unit", "block_size", "page"),
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
def test_stock_raises_an_attention_page_until_it_holds_a_state(state, token, unit, block_size, page):
    assert raised_page(state, token, unit, block_size) == page
