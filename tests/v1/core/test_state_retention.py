# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of retention: which states are kept, and how far a lookup reaches."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.core.prefill_plan import PrefillPlan
from vllm.v1.core.state_retention import LookupGrid, Retention
from vllm.v1.kv_cache_interface import get_mamba_prefill_checkpoint_position

BLOCK = 512


def grid(dcp: int = 1, lookahead: int = 0, drop: bool = False, whole: bool = False) -> LookupGrid:
    """The grid of equal attention and Mamba blocks; `whole` where attention answers for whole blocks, as on stock."""
    return LookupGrid(BLOCK, BLOCK * dcp if whole else BLOCK, BLOCK, BLOCK * dcp, 0 if drop else lookahead, drop)


grids = st.builds(
    grid,
    dcp=st.sampled_from([1, 2, 4]),
    lookahead=st.sampled_from([0, 1, 3]),
    drop=st.booleans(),
    whole=st.booleans(),
)


class TestCheckpointPositions:
    @pytest.mark.parametrize(
        "dcp, prompt, positions",
        [
            (1, 1, ()),
            (1, 511, ()),
            (1, 512, ()),
            (1, 513, (512,)),
            (1, 4095, (2048, 3072, 3584)),
            (1, 8191, (4096, 6144, 7168, 7680)),
            (1, 8192, (4096, 6144, 7168, 7680)),
            (1, 8193, (512, 4608, 6656, 7680, 8192)),
            (1, 16384, (8192, 12288, 14336, 15360, 15872)),
            (1, 32768, (16384, 24576, 28672, 30720, 31744, 32256)),
            (2, 8192, (4096, 6144, 7168, 7680)),
            (2, 16384, (8192, 12288, 14336, 15360, 15872)),
            (4, 8192, (4096, 6144, 7168, 7680)),
            (4, 9000, (1024, 5120, 7168, 8192, 8704)),
        ],
    )
    def test_ladder(self, dcp: int, prompt: int, positions: tuple[int, ...]) -> None:
        assert Retention(grid(dcp)).checkpoint_positions(prompt) == positions

    @pytest.mark.parametrize("prompt, positions", [(8192, (4096, 6144, 7680)), (9000, (4096, 6144, 8192, 8704))])
    def test_whole_attention_blocks_lower_checkpoints(self, prompt: int, positions: tuple[int, ...]) -> None:
        assert Retention(grid(4, whole=True)).checkpoint_positions(prompt) == positions

    @given(st.integers(1, 70_000), st.sampled_from([0, 1, 3]), st.booleans())
    def test_ranks_change_nothing(self, prompt: int, lookahead: int, drop: bool) -> None:
        one, two, four = (Retention(grid(dcp, lookahead, drop)).checkpoint_positions(prompt) for dcp in (1, 2, 4))
        assert one == two == four

    @pytest.mark.parametrize(
        "dcp, positions", [(1, (7168, 7680)), (2, (6144, 7168, 7680)), (4, (4096, 6144, 7168, 7680))]
    )
    def test_replay_keeps_the_last_two_boundaries_of_both_grids(self, dcp: int, positions: tuple[int, ...]) -> None:
        assert Retention(grid(dcp, lookahead=3), "replay").checkpoint_positions(8192) == positions

    def test_block_drop_shifts_reach_one_unit_below_attention_blocks(self) -> None:
        assert Retention(grid(4, drop=True, whole=True)).checkpoint_positions(9000) == (3584, 5632, 7680, 8192)
        assert Retention(grid(2, drop=True, whole=True)).checkpoint_positions(8192) == (3584, 5632, 6656, 7680)

    @given(grids, st.integers(1, 70_000))
    def test_positions_are_few_and_end_at_the_tail(self, lookups: LookupGrid, prompt: int) -> None:
        positions = Retention(lookups).checkpoint_positions(prompt)
        assert len(positions) <= (prompt // BLOCK + 1).bit_length()
        assert list(positions) == sorted(set(positions))
        assert (positions[-1] if positions else 0) == lookups.tail(prompt)
        assert all(0 < position < prompt and lookups.is_reachable(position, prompt) for position in positions)

    @given(grids, st.integers(1, 70_000), st.data())
    @settings(max_examples=400)
    def test_a_follow_up_recomputes_at_most_twice_what_it_must(
        self, lookups: LookupGrid, prompt: int, data: st.DataObject
    ) -> None:
        """`L - hit <= 2 * (L - d) + block`, and what the lookup costs: its lookahead, or the dropped block twice; and
        an attention block where that is wider than a Mamba block."""
        shared = data.draw(st.integers(0, prompt))
        proof = lookups.mamba_block if lookups.drop_block else lookups.hash_lookahead
        hit = max(
            (position for position in Retention(lookups).checkpoint_positions(prompt) if position + proof <= shared),
            default=0,
        )
        bound = 2 * (prompt - shared) + lookups.mamba_block + proof
        if lookups.attention_step > lookups.mamba_block:
            bound += lookups.attention_step - lookups.mamba_block
        assert prompt - hit <= bound


class TestWanted:
    def test_the_tail_and_the_junction_come_first_and_are_protected(self) -> None:
        wanted = Retention(grid()).wanted(8192, 0, 8192, shared_prefix=5120)
        assert [state.position for state in wanted] == [7680, 5120, 7168, 6144]
        assert [state.protected for state in wanted] == [True, True, False, False]

    def test_stocks_checkpoint_counts_among_the_four(self) -> None:
        wanted = Retention(grid()).wanted(8193, 0, 8193, exported=[8192])
        assert [state.position for state in wanted] == [7680, 6656, 4608]

    def test_a_junction_is_lowered_to_where_a_lookup_reaches(self) -> None:
        assert [s.position for s in Retention(grid(4, whole=True)).wanted(8192, 0, 8192, shared_prefix=5120)] == [
            7680,
            4096,
            6144,
        ]

    def test_nothing_at_the_edges_of_the_span(self) -> None:
        assert [s.position for s in Retention(grid()).wanted(8192, 4096, 7680)] == [7168, 6144]

    def test_an_interval_fills_what_is_left_of_the_four(self) -> None:
        assert [s.position for s in Retention(grid(), interval=1024).wanted(16384, 0, 8192)] == [
            7168,
            6144,
            5120,
            4096,
        ]
        assert [s.position for s in Retention(grid(), interval=2048).wanted(4096, 0, 4096)] == [3584, 3072, 2048]

    @given(grids, st.integers(1, 40_000), st.data())
    def test_fits_a_plan_whatever_the_span(self, lookups: LookupGrid, prompt: int, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, prompt // BLOCK)) * BLOCK
        end = data.draw(st.integers(start + 1, start + 8192))
        junction = data.draw(st.integers(0, prompt))
        interval = data.draw(st.sampled_from([None, 0, 2048, 4096]))
        wanted = Retention(lookups, interval=interval).wanted(prompt, start, end, junction)
        if wanted:
            positions = tuple(sorted(state.position for state in wanted))
            PrefillPlan(start, end, positions, {1: tuple(range(1, 1 + len(positions)))})


class TestGrid:
    @given(
        st.integers(0, 50_000),
        st.sampled_from([16, 128, 512, 1024, 2048]),
        st.sampled_from([0, 1, 3, 7]),
        st.booleans(),
    )
    def test_last_boundary_is_stocks(self, prompt: int, unit: int, lookahead: int, drop: bool) -> None:
        lookups = LookupGrid(unit, unit, unit, unit, lookahead, drop)
        stock = get_mamba_prefill_checkpoint_position(prompt, unit, drop, lookahead)
        assert lookups.last_boundary(prompt, unit) == stock

    @given(grids, st.integers(0, 40_000), st.integers(1, 40_000))
    def test_floor_is_reachable_and_the_deepest(self, lookups: LookupGrid, position: int, more_tokens: int) -> None:
        longer = position + more_tokens + 2 * lookups.attention_step
        lowered = lookups.floor(position)
        assert lowered <= position
        assert lowered == 0 or lookups.is_reachable(lowered, longer)
        between = range(lowered + BLOCK, position + 1, BLOCK)
        tail = lookups.tail(longer)
        assert not any(lookups.is_reachable(other, longer) for other in between if other != tail)

    @pytest.mark.parametrize("name", ["mamba_block", "attention_step", "hit_alignment", "scheduler_block"])
    def test_sizes_are_multiples_of_the_alignment(self, name: str) -> None:
        sizes: dict[str, Any] = dict.fromkeys(
            ("mamba_block", "attention_step", "hit_alignment", "scheduler_block"), 512
        )
        sizes[name] = 500
        with pytest.raises(ValueError, match=f"{name} must be a positive multiple of 16"):
            LookupGrid(**sizes)

    def test_unknown_policy_is_named(self) -> None:
        with pytest.raises(ValueError, match="unknown retention policy 'stairs'; choose one of ladder, replay"):
            Retention(grid(), "stairs")  # type: ignore[arg-type]
