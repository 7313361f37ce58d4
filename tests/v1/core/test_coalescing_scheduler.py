# SPDX-License-Identifier: Apache-2.0
"""What the scheduler runs and retains, on vLLM's own scheduler and KV cache manager."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from vllm.v1.core.prefill_plan import PrefillPlan
from vllm.v1.core.prefill_plan_stats import Fallback
from vllm.v1.core.state_retention import Policy
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm_kda_prefill.planning import Engine, Layout

Spans = list[tuple[int, int, tuple[int, ...]]]
Retained = Callable[[Engine, Request], list[int]]


def words(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def prefill(engine: Engine, name: str, tokens: list[int], max_tokens: int = 1) -> tuple[Request, Spans]:
    """Run a request alone to its end; its prefill spans with the checkpoints that each exports."""
    request = engine.add(name, tokens, max_tokens)
    spans: Spans = []
    while engine.scheduler.requests:
        start = request.num_computed_tokens
        output = engine.step()
        if start < len(tokens):
            new = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            start = new.get(name, start)
            plan = output.kda_prefill_plans.get(name)
            spans.append((start, start + output.num_scheduled_tokens[name], plan.positions if plan else ()))
    return request, spans


def build(dcp: int = 1, mtp: int = 0, policy: Policy = "ladder", asynchronous: bool = False, **layout: Any) -> Engine:
    return Engine.build(Layout(dcp=dcp, mtp=mtp, **layout), "coalesced", policy, asynchronous)


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
            (4, "ladder", (4096, 6144, 7680)),
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
            (4, 4095, [2048, 3584]),
            (1, 8191, [4096, 6144, 7168, 7680]),
            (1, 8193, [512, 4608, 6656, 7680, 8192]),
            (2, 8193, [4096, 6144, 7168, 8192]),
            (1, 8704, [512, 4608, 6656, 7680, 8192]),
            (1, 9000, [1024, 5120, 7168, 8192, 8704]),
            (4, 9000, [4096, 6144, 8192, 8704]),
            (1, 16384, [8192, 12288, 14336, 15360, 15872]),
            (1, 32768, [16384, 24576, 28672, 30720, 31744, 32256]),
            (1, 40960, [8192, 24576, 32768, 36864, 38912, 39936, 40448]),
            (4, 40960, [8192, 24576, 32768, 36864, 38912, 40448]),
        ],
    )
    def test_every_rung_is_retained(self, dcp: int, prompt: int, kept: list[int], mtp: int, states: Any) -> None:
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
            (2, 8192, [3584, 5632, 6656, 7680]),
            (4, 8192, [3584, 5632, 7680]),
            (4, 9000, [3584, 5632, 7680, 8192]),
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
        assert len({page for pages in plan.block_ids.values() for page in pages}) == 12
        assert states.retained(engine, request) == [4096, 6144, 7168, 7680]

    @pytest.mark.parametrize("interval, more", [(1024, [7168]), (2048, [6144]), (4096, [4096])])
    def test_a_retention_interval_adds_its_multiples(self, interval: int, more: list[int], states: Any) -> None:
        engine = build(retention_interval=interval)
        request, spans = prefill(engine, "a", words(16384))
        assert spans[1][2] == (12288, 14336, 15360, 15872)
        kept = states.retained(engine, request)
        assert set(more) <= set(kept)
        assert all(state % interval == 0 for state in kept if state <= 8192)

    def test_dense_retention_keeps_the_rungs_too(self, states: Any) -> None:
        engine = build(retention_interval=None)
        request, spans = prefill(engine, "a", words(8192))
        assert spans == [(0, 8192, (4096, 6144, 7168, 7680))]
        assert states.retained(engine, request) == [4096, 6144, 7168, 7680, 8192]

    @pytest.mark.parametrize(
        "dcp, attention, mamba",
        [(dcp, *sizes) for dcp in (1, 2) for sizes in ((256, 512), (512, 1024), (128, 512))] + [(2, 512, 256)],
    )
    def test_pages_of_different_sizes(self, attention: int, mamba: int, dcp: int, states: Any) -> None:
        engine = build(dcp, 3, attention_block=attention, mamba_block=mamba)
        request, spans = prefill(engine, "a", words(8192))
        grid = engine.scheduler.retention.grid
        assert (grid.mamba_block, grid.attention_block) == (mamba, attention * dcp)
        assert [span[:2] for span in spans] == [(0, 8192)]
        kept = states.retained(engine, request)
        assert kept == list(spans[0][2])
        assert len(kept) >= 3
        assert all(grid.is_reachable(state, 8192) for state in kept)
        assert prefill(engine, "b", words(8192))[1][0][0] == kept[-1]

    def test_a_page_wider_than_a_chunk_is_filled_in_steps(self) -> None:
        small: list[dict[str, Any]] = [{"budget": 256}, {"long_prefill_threshold": 256}]
        for layout in (*small, {"budget": 512, "mamba_block": 1024}):
            engine = build(**layout)
            engine.add("a", words(1300))
            engine.add("b", words(1100, 5000))
            for _ in range(30):
                engine.step()
            assert not engine.scheduler.requests, layout

    def test_wide_mamba_pages_end_chunks_on_their_own_grid(self) -> None:
        engine = build(attention_block=256, mamba_block=1024, budget=2304)
        assert [span[:2] for span in prefill(engine, "a", words(5000))[1]] == [(0, 2048), (2048, 4096), (4096, 5000)]


class TestHits:
    @pytest.mark.parametrize("mtp", [0, 3])
    @pytest.mark.parametrize(
        "dcp, hits", [(1, (7680, 7168, 6144, 4096)), (2, (7680, 7168, 6144, 4096)), (4, (7680, 6144, 6144, 4096))]
    )
    @pytest.mark.parametrize("leaves", [0, 1, 2, 3])
    def test_a_branch_resumes_at_the_rung_below(
        self, dcp: int, hits: tuple[int, ...], mtp: int, leaves: int, states: Any
    ) -> None:
        engine = build(dcp, mtp)
        prefill(engine, "a", words(8192))
        shared = (7900, 7400, 6500, 5000)[leaves]
        request, spans = prefill(engine, "b", words(shared) + words(8192 - shared, 50_000))
        (span,) = spans
        assert span[:2] == (hits[leaves], 8192)
        rungs = engine.scheduler.retention.checkpoint_positions(8192)
        assert set(rungs) <= set(states.retained(engine, request))
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


def evict_states(engine: Engine) -> int:
    """Take every recurrent state out of the prefix cache, and leave the attention blocks."""
    manager = engine.scheduler.kv_cache_manager
    groups = [i for i, g in enumerate(engine.scheduler.kv_cache_config.kv_cache_groups) if i]
    pool = manager.block_pool
    states = {
        block.block_id
        for key, found in list(pool.cached_block_hash_to_block._cache.items())
        for block in (found.values() if isinstance(found, dict) else (found,))
        if int.from_bytes(key[-4:], "big") in groups
    }
    manager.evict_blocks(states)
    return len(states)


class TestOutput:
    def make_output(self) -> Any:
        engine = build(4, 3, "replay", mamba_groups=2)
        engine.add("a", words(8192))
        return engine.scheduler.schedule()

    def test_plans_survive_pickling_to_a_worker(self) -> None:
        output = self.make_output()
        assert pickle.loads(pickle.dumps(output)).kda_prefill_plans == output.kda_prefill_plans

    def test_plans_survive_msgpack(self) -> None:
        plans = self.make_output().kda_prefill_plans
        decoded = MsgpackDecoder(dict[str, PrefillPlan]).decode(MsgpackEncoder().encode(plans))
        assert decoded == plans
        assert isinstance(decoded["a"], PrefillPlan)
        assert isinstance(decoded["a"].positions, tuple)

    def test_a_bad_plan_is_refused_on_arrival(self) -> None:
        encoded = msgspec.msgpack.encode({"start": 0, "end": 512, "positions": (512,), "block_ids": {1: (5,)}})
        with pytest.raises(msgspec.ValidationError, match="not inside the query span"):
            msgspec.msgpack.decode(encoded, type=PrefillPlan)

    def test_only_exporting_requests_have_a_plan(self) -> None:
        engine = build()
        engine.add("short", words(300), max_tokens=3)
        engine.add("long", words(2000, 5000), max_tokens=3)
        assert engine.step().kda_prefill_plans.keys() == {"long"}
        decode = engine.step()
        assert decode.num_scheduled_tokens.keys() == {"short", "long"}
        assert decode.kda_prefill_plans == {}

    def test_a_changed_token_count_binds_stocks_checkpoint_at_most(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = build(budget=4096)
        scheduler = engine.scheduler
        monkeypatch.setattr(scheduler, "_reserve_prefill_lookahead", lambda request, computed, new: new - 512)
        engine.add("a", words(8192))
        output = engine.scheduler.schedule()
        assert output.num_scheduled_tokens == {"a": 3584}
        assert output.kda_prefill_plans == {}
        assert scheduler.plan_stats.fallbacks == Counter({Fallback.SPAN_CHANGED: 1})


class TestFallbacks:
    def test_none_for_a_plain_prompt(self) -> None:
        engine = build()
        prefill(engine, "a", words(8192), max_tokens=4)
        assert engine.scheduler.plan_stats.fallbacks == Counter()
        assert engine.scheduler.plan_stats.spans == 1
        assert engine.scheduler.plan_stats.states == 4

    def test_unaligned_start(self) -> None:
        engine = build(attention_block=512, mamba_block=1024)
        prefill(engine, "a", words(8192 + 600))
        _, spans = prefill(engine, "b", words(8192 + 600) + words(3000, 50_000))
        assert [span[:2] for span in spans] == [(8704, 9216), (9216, 11792)]
        assert engine.scheduler.plan_stats.fallbacks == Counter({Fallback.UNALIGNED_START: 1})

    def test_replayed_output(self) -> None:
        engine = build()
        request = engine.add("a", words(2000), max_tokens=50)
        for _ in range(3):
            engine.step()
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert request.status == RequestStatus.PREEMPTED
        output = engine.step()
        assert output.num_scheduled_tokens == {"a": request.num_prompt_tokens + 3}
        assert engine.scheduler.plan_stats.fallbacks == Counter({Fallback.REPLAYED_OUTPUT: 1})

    def test_no_room(self) -> None:
        """A span past the stop at a junction is not tried where it might not fit; the stop is."""
        engine = build(num_blocks=20)
        prefill(engine, "a", words(8192))
        while evict_states(engine):
            pass
        _, spans = prefill(engine, "b", words(5000) + words(3192, 50_000))
        assert spans[0][:2] == (0, 4608)
        assert engine.scheduler.plan_stats.fallbacks[Fallback.NO_ROOM] == 1

    @pytest.mark.parametrize("waiting", [0, 3])
    def test_a_block_that_has_nothing_to_do_with_tokens_takes_no_room(self, waiting: int) -> None:
        """The indexer's open pool: 16 tokens a block, and one block a request however long it is."""
        engine = build(num_blocks=200, open_pool=16)
        prefill(engine, "a", words(8192))
        while evict_states(engine):
            pass
        engine.add("b", words(5000) + words(3192, 50_000))
        for name in range(waiting):
            engine.add(f"{name}", words(8192, 100_000 * (1 + name)))
        assert engine.step().num_scheduled_tokens == {"b": 8192}
        assert not engine.scheduler.plan_stats.fallbacks

    def test_encoder_input(self) -> None:
        engine = build()
        request = engine.add("a", words(2000))
        feature = type("Feature", (), {"mm_position": type("Range", (), {"offset": 100, "length": 50})})
        request.mm_features.append(feature)  # type: ignore[arg-type]
        assert engine.scheduler._fallback(request, 0, 0) is Fallback.ENCODER_INPUT
        assert engine.scheduler._fallback(request, 512, 0) is None

    def test_external_load(self) -> None:
        engine = build()
        request = engine.add("a", words(2000))
        assert engine.scheduler._fallback(request, 512, 512) is Fallback.EXTERNAL_LOAD
        tokens = engine.scheduler._mamba_block_aligned_split(request, 1488, 0, 512)
        assert tokens == 1488
        assert {name: prefill.fallback for name, prefill in engine.scheduler._step.items()} == {
            "a": Fallback.EXTERNAL_LOAD
        }
