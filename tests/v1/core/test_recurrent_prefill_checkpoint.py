"""The arithmetic of plans and retention: what a plan may be, what is kept, how far a lookup reaches."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.core.recurrent_prefill_checkpoint import BoundPlan, LookupGrid, PrefillPlan, Retention
from vllm.v1.kv_cache_interface import get_mamba_prefill_checkpoint_position

PAGE = 512


def grid(dcp: int = 1, lookahead: int = 0, drop: bool = False, page: int = PAGE) -> LookupGrid:
    """The grid of equal attention and Mamba pages."""
    return LookupGrid(page, page * dcp, page, page * dcp, 0 if drop else lookahead, drop)


grids = st.builds(grid, dcp=st.sampled_from([1, 2, 4]), lookahead=st.sampled_from([0, 1, 3]), drop=st.booleans())


class TestPlan:
    @pytest.mark.parametrize(
        "start, end, positions, problem",
        [
            (0, 8192, (), "1 to 4 checkpoints, got 0"),
            (0, 8192, (512, 1024, 2048, 4096, 7680), "1 to 4 checkpoints, got 5"),
            (0, 8192, (4096, 4096), "sorted and unique"),
            (0, 8192, (7168, 4096), "sorted and unique"),
            (0, 8192, (4097,), "multiple of 16"),
            (8, 8192, (4096,), "multiple of 16"),
            (0, 8192, (0, 4096), "not inside"),
            (4096, 8192, (4096,), "not inside"),
            (0, 8192, (8192,), "not inside"),
            (0, 8192, (9216,), "not inside"),
            (512, 512, (512,), "empty"),
            (-512, 512, (0,), "below 0"),
            (0, 8192, (4096.0,), "plain integers"),
            (0, 8192, (True,), "plain integers"),
        ],
    )
    def test_rejects(self, start: int, end: int, positions: tuple[int, ...], problem: str) -> None:
        with pytest.raises(ValueError, match=problem):
            PrefillPlan(start, end, positions)

    def test_offsets_count_from_the_start(self) -> None:
        assert PrefillPlan(1024, 8192, (4096, 7680)).offsets == (3072, 6656)

    @pytest.mark.parametrize(
        "pages, problem",
        [
            ({}, "at least one KV cache group"),
            ({1: (5,)}, "1 pages for 2"),
            ({1: (5, 6, 7)}, "3 pages for 2"),
            ({1: (5, 0)}, "page 0"),
            ({1: (5, -1)}, "page -1"),
            ({1: (5, 5)}, "page 5"),
            ({1: (5, 6), 2: (7, 6)}, "group 2: page 6"),
            ({1: (5, 6.0)}, "page 6.0"),
        ],
    )
    def test_bound_plan_rejects(self, pages: dict[int, tuple[int, ...]], problem: str) -> None:
        with pytest.raises(ValueError, match=problem):
            BoundPlan(0, 8192, (4096, 7680), pages)

    def test_bound_plan_rejects_bad_positions_too(self) -> None:
        with pytest.raises(ValueError, match="sorted and unique"):
            BoundPlan(0, 8192, (7680, 4096), {1: (5, 6)})

    def test_survives_pickling(self) -> None:
        plan = BoundPlan(0, 8192, (4096, 7680), {1: (5, 6), 2: (7, 8)})
        assert pickle.loads(pickle.dumps(plan)) == plan


class TestRungs:
    @pytest.mark.parametrize(
        "dcp, prompt, rungs",
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
            (4, 8192, (4096, 6144, 7680)),
            (4, 9000, (4096, 6144, 8192, 8704)),
        ],
    )
    def test_ladder(self, dcp: int, prompt: int, rungs: tuple[int, ...]) -> None:
        assert Retention(grid(dcp)).rungs(prompt) == rungs

    @pytest.mark.parametrize("dcp, rungs", [(1, (7168, 7680)), (2, (6144, 7168, 7680)), (4, (4096, 6144, 7168, 7680))])
    def test_replay_keeps_the_last_two_boundaries_of_both_grids(self, dcp: int, rungs: tuple[int, ...]) -> None:
        assert Retention(grid(dcp, lookahead=3), "replay").rungs(8192) == rungs

    def test_block_drop_shifts_reach_one_unit_below_attention_blocks(self) -> None:
        assert Retention(grid(4, drop=True)).rungs(9000) == (3584, 5632, 7680, 8192)
        assert Retention(grid(2, drop=True)).rungs(8192) == (3584, 5632, 6656, 7680)

    @given(grids, st.integers(1, 70_000))
    def test_rungs_are_few_and_end_at_the_tail(self, lookups: LookupGrid, prompt: int) -> None:
        rungs = Retention(lookups).rungs(prompt)
        assert len(rungs) <= (prompt // PAGE + 1).bit_length()
        assert list(rungs) == sorted(set(rungs))
        assert (rungs[-1] if rungs else 0) == lookups.tail(prompt)
        assert all(0 < rung < prompt and lookups.is_reachable(rung, prompt) for rung in rungs)

    @given(grids, st.integers(1, 70_000), st.data())
    @settings(max_examples=400)
    def test_a_follow_up_recomputes_at_most_twice_what_it_must(
        self, lookups: LookupGrid, prompt: int, data: st.DataObject
    ) -> None:
        """`L - hit <= 2 * (L - d) + page`, and what the lookup costs: its lookahead, or the dropped page twice; and
        an attention block where that is wider than a page."""
        shared = data.draw(st.integers(0, prompt))
        proof = lookups.page if lookups.drop_block else lookups.hash_lookahead
        hit = max((rung for rung in Retention(lookups).rungs(prompt) if rung + proof <= shared), default=0)
        bound = 2 * (prompt - shared) + lookups.page + proof
        if lookups.attention_block > lookups.page:
            bound += lookups.attention_block - lookups.page
        assert prompt - hit <= bound


class TestWanted:
    def test_the_tail_and_the_junction_come_first_and_are_first_class(self) -> None:
        wanted = Retention(grid()).wanted(8192, 0, 8192, shared_prefix=5120)
        assert [state.position for state in wanted] == [7680, 5120, 7168, 6144]
        assert [state.first_class for state in wanted] == [True, True, False, False]

    def test_stocks_checkpoint_counts_among_the_four(self) -> None:
        wanted = Retention(grid()).wanted(8193, 0, 8193, exported=[8192])
        assert [state.position for state in wanted] == [7680, 6656, 4608]

    def test_a_junction_is_lowered_to_where_a_lookup_reaches(self) -> None:
        assert [s.position for s in Retention(grid(4)).wanted(8192, 0, 8192, shared_prefix=5120)] == [
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
        start = data.draw(st.integers(0, prompt // PAGE)) * PAGE
        end = data.draw(st.integers(start + 1, start + 8192))
        junction = data.draw(st.integers(0, prompt))
        interval = data.draw(st.sampled_from([None, 0, 2048, 4096]))
        wanted = Retention(lookups, interval=interval).wanted(prompt, start, end, junction)
        if wanted:
            PrefillPlan(start, end, tuple(sorted(state.position for state in wanted)))


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
        longer = position + more_tokens + 2 * lookups.attention_block
        lowered = lookups.floor(position)
        assert lowered <= position
        assert lowered == 0 or lookups.is_reachable(lowered, longer)
        between = range(lowered + PAGE, position + 1, PAGE)
        tail = lookups.tail(longer)
        assert not any(lookups.is_reachable(other, longer) for other in between if other != tail)

    @pytest.mark.parametrize("name", ["page", "attention_block", "hit_alignment", "scheduler_block"])
    def test_sizes_are_whole_chunks(self, name: str) -> None:
        sizes: dict[str, Any] = dict.fromkeys(("page", "attention_block", "hit_alignment", "scheduler_block"), 512)
        sizes[name] = 500
        with pytest.raises(ValueError, match=f"{name} must be a positive multiple of 16"):
            LookupGrid(**sizes)

    def test_unknown_policy_is_named(self) -> None:
        with pytest.raises(ValueError, match="unknown retention policy 'stairs'; choose one of ladder, replay"):
            Retention(grid(), "stairs")  # type: ignore[arg-type]
