# SPDX-License-Identifier: Apache-2.0
"""What the scheduler runs and retains, on vLLM's own scheduler and KV cache manager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.v1.core.driving import build, evict_states, prefill, words
from vllm.v1.core.state_retention import Policy
from vllm.v1.request import Request
from vllm_kda_prefill.planning import Engine, Layout

Retained = Callable[[Engine, Request], list[int]]


class TestSpans:
    @pytest.mark.parametrize("mtp", [0, 3])
    @pytest.mark.parametrize("asynchronous", [False, True])
    @pytest.mark.parametrize(
        "dcp, policy, positions",
        [
            (1, "replay", (7168, 7680)),
            (2, "replay", (6144, 7168, 7680)),
            (4, "replay", (4096, 6144, 7168, 7680)),
            (1, "ladder", (4096, 6144, 7168, 7680)),
            (2, "ladder", (4096, 6144, 7168, 7680)),
            (4, "ladder", (4096, 6144, 7168, 7680)),
        ],
    )
    def test_8k_is_one_query(
        self, dcp: int, mtp: int, policy: Policy, positions: tuple[int, ...], asynchronous: bool
    ) -> None:
        engine = build(dcp, mtp, policy, asynchronous)
        engine.add("a", words(8192))
        output = engine.scheduler.schedule()
        assert output.num_scheduled_tokens == {"a": 8192}
        assert output.kda_prefill_plans["a"].positions == positions

    @pytest.mark.parametrize("prompt, queries", [(16384, 2), (32768, 4), (40960, 5)])
    def test_long_prompts_are_whole_budgets(self, prompt: int, queries: int) -> None:
        _, spans = prefill(build(4, 3, "replay"), "a", words(prompt))
        assert [span[:2] for span in spans] == [(k * 8192, (k + 1) * 8192) for k in range(queries)]
        s, f = 2048, 512
        assert spans[-1][2] == tuple(sorted({prompt - s, prompt - 2 * s, prompt - f, prompt - 2 * f}))

    @pytest.mark.parametrize("mtp", [0, 3])
    @pytest.mark.parametrize(
        "dcp, prompt, kept",
        [
            (1, 1, []),
            (1, 511, []),
            (1, 512, []),
            (1, 513, [512]),
            (2, 513, [512]),
            (1, 4095, [2048, 3072, 3584]),
            (4, 4095, [2048, 3072, 3584]),
            (1, 8191, [4096, 6144, 7168, 7680]),
            (1, 8193, [512, 4608, 6656, 7680, 8192]),
            (2, 8193, [512, 4608, 6656, 7680, 8192]),
            (1, 8704, [512, 4608, 6656, 7680, 8192]),
            (1, 9000, [1024, 5120, 7168, 8192, 8704]),
            (4, 9000, [1024, 5120, 7168, 8192, 8704]),
            (1, 16384, [8192, 12288, 14336, 15360, 15872]),
            (1, 32768, [16384, 24576, 28672, 30720, 31744, 32256]),
            (1, 40960, [8192, 24576, 32768, 36864, 38912, 39936, 40448]),
            (4, 40960, [8192, 24576, 32768, 36864, 38912, 39936, 40448]),
        ],
    )
    def test_every_checkpoint_is_retained(self, dcp: int, prompt: int, kept: list[int], mtp: int, states: Any) -> None:
        engine = build(dcp, mtp)
        request, spans = prefill(engine, "a", words(prompt))
        assert states.retained(engine, request) == kept
        assert len(spans) == -(-prompt // 8192)

    @pytest.mark.parametrize(
        "dcp, prompt, kept",
        [
            (1, 8192, [4096, 6144, 7168, 7680]),
            (1, 8193, [4096, 6144, 7168, 7680]),
            (1, 512, []),
            (1, 1024, [512]),
            (2, 8192, [4096, 6144, 7168, 7680]),
            (4, 8192, [4096, 6144, 7168, 7680]),
            (4, 9000, [512, 4608, 6656, 7680, 8192]),
        ],
    )
    def test_block_drop_retains_what_it_can_reach(self, dcp: int, prompt: int, kept: list[int], states: Any) -> None:
        engine = build(dcp, 3, block_drop=True)
        request, spans = prefill(engine, "a", words(prompt))
        assert states.retained(engine, request) == kept
        assert len(spans) == -(-prompt // 8192)

    def test_stock_needs_as_many_queries_as_states(self, states: Any) -> None:
        engine = Engine.build(Layout(dcp=4, mtp=3), "stock")
        request = engine.add("a", words(8192))
        output = engine.step()
        assert output.num_scheduled_tokens == {"a": 8192}
        assert not hasattr(output, "kda_prefill_plans")
        assert states.retained(engine, request) == [7680]

    def test_several_mamba_groups_hold_the_same_positions(self, states: Any) -> None:
        engine = build(2, 3, mamba_groups=3)
        request = engine.add("a", words(8192))
        plan = engine.step().kda_prefill_plans["a"]
        assert plan.positions == (4096, 6144, 7168, 7680)
        assert sorted(plan.block_ids) == [1, 2, 3]
        assert len({block_id for ids in plan.block_ids.values() for block_id in ids}) == 12
        assert states.retained(engine, request) == [4096, 6144, 7168, 7680]

    @pytest.mark.parametrize("interval, more", [(1024, [7168]), (2048, [6144]), (4096, [4096])])
    def test_a_retention_interval_adds_its_multiples(self, interval: int, more: list[int], states: Any) -> None:
        engine = build(retention_interval=interval)
        request, spans = prefill(engine, "a", words(16384))
        assert spans[1][2] == (12288, 14336, 15360, 15872)
        kept = states.retained(engine, request)
        assert set(more) <= set(kept)
        assert all(state % interval == 0 for state in kept if state <= 8192)

    def test_dense_retention_keeps_the_ladder_too(self, states: Any) -> None:
        engine = build(retention_interval=None)
        request, spans = prefill(engine, "a", words(8192))
        assert spans == [(0, 8192, (4096, 6144, 7168, 7680))]
        assert states.retained(engine, request) == [4096, 6144, 7168, 7680, 8192]

    @pytest.mark.parametrize(
        "dcp, attention, mamba",
        [(dcp, *sizes) for dcp in (1, 2) for sizes in ((256, 512), (512, 1024), (128, 512))] + [(2, 512, 256)],
    )
    def test_blocks_of_different_sizes(self, attention: int, mamba: int, dcp: int, states: Any) -> None:
        engine = build(dcp, 3, attention_block=attention, mamba_block=mamba)
        request, spans = prefill(engine, "a", words(8192))
        grid = engine.scheduler.retention.grid
        assert (grid.mamba_block, grid.attention_step) == (mamba, grid.hit_alignment)
        assert [span[:2] for span in spans] == [(0, 8192)]
        kept = states.retained(engine, request)
        assert kept == list(spans[0][2])
        assert len(kept) >= 3
        assert all(grid.is_reachable(state, 8192) for state in kept)
        assert prefill(engine, "b", words(8192))[1][0][0] == kept[-1]

    def test_a_block_wider_than_a_chunk_is_filled_in_steps(self) -> None:
        small: list[dict[str, Any]] = [{"budget": 256}, {"long_prefill_threshold": 256}]
        for layout in (*small, {"budget": 512, "mamba_block": 1024}):
            engine = build(**layout)
            engine.add("a", words(1300))
            engine.add("b", words(1100, 5000))
            for _ in range(30):
                engine.step()
            assert not engine.scheduler.requests, layout

    def test_wide_mamba_blocks_end_chunks_on_their_own_grid(self) -> None:
        engine = build(attention_block=256, mamba_block=1024, budget=2304)
        assert [span[:2] for span in prefill(engine, "a", words(5000))[1]] == [(0, 2048), (2048, 4096), (4096, 5000)]


class TestHits:
    @pytest.mark.parametrize("mtp", [0, 3])
    @pytest.mark.parametrize("dcp, hits", [(dcp, (7680, 7168, 6144, 4096)) for dcp in (1, 2, 4)])
    @pytest.mark.parametrize("leaves", [0, 1, 2, 3])
    def test_a_branch_resumes_at_the_checkpoint_below(
        self, dcp: int, hits: tuple[int, ...], mtp: int, leaves: int, states: Any
    ) -> None:
        engine = build(dcp, mtp)
        prefill(engine, "a", words(8192))
        shared = (7900, 7400, 6500, 5000)[leaves]
        request, spans = prefill(engine, "b", words(shared) + words(8192 - shared, 50_000))
        (span,) = spans
        assert span[:2] == (hits[leaves], 8192)
        positions = engine.scheduler.retention.checkpoint_positions(8192)
        assert set(positions) <= set(states.retained(engine, request))
        stock = Engine.build(Layout(dcp=dcp, mtp=mtp), "stock")
        for name, tokens in (("a", words(8192)), ("b", list(request.prompt_token_ids or ()))):
            found = stock.add(name, tokens)
            first = stock.step()
            while stock.scheduler.requests:
                stock.step()
        assert found.num_prompt_tokens == 8192
        assert first.scheduled_new_reqs[0].num_computed_tokens == (7680 if leaves == 0 else 0)

    @pytest.mark.parametrize("dcp", [1, 2, 4])
    @pytest.mark.parametrize("mtp, drop", [(0, False), (3, False), (3, True)])
    def test_repeats_hit_at_the_second_sighting(self, dcp: int, mtp: int, drop: bool) -> None:
        for prompt in (4095, 8192, 9000, 16384):
            engine = build(dcp, mtp, block_drop=drop)
            prefill(engine, "a", words(prompt))
            tail = engine.scheduler.retention.grid.tail(prompt)
            _, repeat = prefill(engine, "b", words(prompt))
            assert repeat[0][:2] == (tail, prompt)
            _, extended = prefill(engine, "c", words(prompt) + words(3000, 50_000))
            assert extended[0][0] == tail
            assert len(extended) == 1

    @pytest.mark.parametrize("dcp", [1, 2, 4])
    def test_a_junction_is_a_position_and_no_stop(self, dcp: int, states: Any) -> None:
        engine = build(dcp, 3)
        prefill(engine, "a", words(8192))
        while evict_states(engine):
            pass
        _request, spans = prefill(engine, "b", words(6500) + words(1692, 50_000))
        junction = engine.scheduler.retention.grid.floor(6500)
        assert [span[:2] for span in spans] == [(0, 8192)]
        assert junction in spans[0][2]
        assert prefill(engine, "c", words(6500) + words(1692, 90_000))[1][0][0] == junction
        stock = Engine.build(Layout(dcp=dcp, mtp=3), "stock")
        for name, tokens in (("a", words(8192)), ("b", words(6500) + words(1692, 50_000))):
            stock.add(name, tokens)
            first = stock.step()
        assert first.num_scheduled_tokens["b"] < 8192

    def test_siblings_in_one_step_wait_for_the_junction(self) -> None:
        """Like stock's, which are deferred to the step after the stop at the junction."""
        for arm in ("stock", "coalesced"):
            engine = Engine.build(Layout(budget=16384), arm)
            engine.add("seed", words(8192))
            engine.step()
            while evict_states(engine):
                pass
            engine.add("b", words(6500) + words(1000, 50_000))
            engine.add("c", words(6500) + words(1000, 90_000))
            first, second = engine.step(), engine.step()
            assert "c" not in first.num_scheduled_tokens, arm
            assert {new.req_id: new.num_computed_tokens for new in second.scheduled_new_reqs} == {"c": 6144}, arm

    def test_a_continuation_gets_a_plan_chunk_after_chunk(self) -> None:
        engine = build(1, 3, budget=4096)
        _, spans = prefill(engine, "a", words(8192))
        assert spans == [(0, 4096, ()), (4096, 8192, (6144, 7168, 7680))]
        assert prefill(engine, "b", words(5000) + words(3192, 50_000))[1] == [(4096, 8192, (4608, 6144, 7168, 7680))]
