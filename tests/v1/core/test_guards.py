# SPDX-License-Identifier: Apache-2.0
"""Faults of stock vLLM 0.33.0, each in its smallest case: stock has it, the coalescing scheduler has not.

The label-checking worker of shadow_worker.py raises where a request reads, or the prefix cache promises, something that
was never computed. docs/upstream.md tells both in plain words.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.plugins.kda_prefill_coalescing import GATE, SPLIT_TARGET
from vllm.v1.core import stock_guards
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.core.step_prefill import StepPrefill
from vllm_kda_prefill.planning import Arm, Engine, Layout


def words(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def copy_of_an_unwritten_block(arm: Arm, states: Any) -> list[dict[str, int]]:
    """A state outlives its attention blocks; one step writes them again and copies the last one for a hit."""
    worker = states.ShadowWorker(Engine.build(Layout(dcp=4, budget=16384), arm))
    worker.add("a", words(3000))
    worker.run()
    pool = worker.scheduler.kv_cache_manager.block_pool
    attention = {block.block_id for key, block in states.entries(pool) if get_group_id(key) == 0}
    pool.evict_blocks(attention)
    worker.add("b", words(5000))
    worker.add("c", words(4200) + words(300, 60_000))
    steps = []
    while worker.scheduler.requests:
        answer = worker.step()
        steps.append(dict(answer.output.num_scheduled_tokens))
        worker.deliver(answer)
    return steps


def preemption_inside_a_step(arm: Arm, states: Any) -> list[dict[str, int]]:
    """An urgent request needs a block right after a chunk was allocated to the request that has to give way."""
    layout = Layout(budget=2048, long_prefill_threshold=512, num_blocks=14, scheduling="priority")
    worker = states.ShadowWorker(Engine.build(layout, arm))
    worker.add("victim", words(5000), priority=5)
    worker.deliver(worker.step())
    worker.add("urgent", words(510, 90_000), max_tokens=8, priority=0)
    steps = []
    for _ in range(8):
        answer = worker.step()
        steps.append(dict(answer.output.num_scheduled_tokens))
        worker.deliver(answer)
    assert worker.requests["victim"].num_preemptions == 1
    return steps


class TestCopyOfAnUnwrittenBlock:
    def test_stock_copies_it(self, states: Any) -> None:
        with pytest.raises(states.Fault, match=r"c attends to token 2048 in block .*: not its KV"):
            copy_of_an_unwritten_block("stock", states)

    @pytest.mark.parametrize(("cap", "most"), [(4000, 4000), (None, 4199)])
    def test_the_hit_is_looked_up_as_far_as_stock_did(self, cap: int | None, most: int, states: Any) -> None:
        # Stock caps its own lookup where another output of the request, as its routed experts, is cached less far.
        lookups: list[int | None] = []
        reported: list[Any] = []

        def look_up(block_hashes: Any, most: int) -> Any:
            lookups.append(most)
            return [[object()]] * 8, 2576, 0

        worker = states.ShadowWorker(Engine.build(Layout(dcp=4, budget=16384), "coalesced"))
        manager = worker.scheduler.kv_cache_manager
        if cap is not None:
            worker.scheduler.aux_output_connector = SimpleNamespace(max_cache_hit=lambda request: cap)
        manager.coordinator.find_longest_cache_hit = look_up
        worker.scheduler._step["b"] = StepPrefill(0, 5000, is_admission=True)
        worker.add("c", words(4200))
        request = worker.scheduler.requests["c"]
        # Who follows the cache has been told of the hit by stock's lookup.
        manager.enable_kv_cache_events, request.kv_cache_report_mode = True, "full"
        manager.coordinator.emit_cached_block_events = lambda *hit: reported.append(hit)
        assert not worker.scheduler._waits_for_this_step(request, 2560, 2576)
        assert lookups == [most]
        assert not reported

    def test_the_hit_waits_for_the_next_step(self, states: Any) -> None:
        assert copy_of_an_unwritten_block("coalesced", states) == [{"b": 5000}, {"c": 404}]

    def test_fails_without_the_guard(self, states: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stock_guards, "copies_unwritten_block", lambda *args: False)
        with pytest.raises(states.Fault, match="c attends to token 2048"):
            copy_of_an_unwritten_block("coalesced", states)

    def test_a_block_written_beyond_the_hit_is_copied_at_once(self, states: Any) -> None:
        """No more waiting than needed: the copied part was written in an earlier step."""
        worker = states.ShadowWorker(Engine.build(Layout(dcp=4, budget=4096)))
        worker.add("a", words(3000))
        worker.run()
        worker.add("b", words(3000) + words(800, 50_000))
        worker.add("c", words(3000) + words(800, 70_000))
        answer = worker.step()
        assert answer.output.num_scheduled_tokens == {"b": 1240, "c": 1240}
        assert len(answer.output.kv_cache_block_copies or ()) == 2


class TestPreemptionInsideAStep:
    def test_stock_keeps_entries_that_nobody_writes(self, states: Any) -> None:
        with pytest.raises(states.Fault, match=r"is cached (up to|as the state after) \d+"):
            preemption_inside_a_step("stock", states)

    def test_they_are_withdrawn(self, states: Any) -> None:
        assert preemption_inside_a_step("coalesced", states)

    def test_fails_without_the_guard(self, states: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stock_guards, "withdraw_unwritten", lambda manager, request: None)
        with pytest.raises(states.Fault, match=r"is cached (up to|as the state after) \d+"):
            preemption_inside_a_step("coalesced", states)

    def test_entries_of_earlier_steps_stay(self, states: Any) -> None:
        layout = Layout(budget=2048, long_prefill_threshold=512, num_blocks=14, scheduling="priority")
        worker = states.ShadowWorker(Engine.build(layout))
        victim = worker.add("victim", words(5000), priority=5)
        worker.deliver(worker.step())
        computed = victim.num_computed_tokens
        manager = worker.scheduler.kv_cache_manager
        stock_guards.withdraw_unwritten(manager, victim)
        cached = [block.block_hash_num_tokens for _, block in states.entries(manager.block_pool)]
        assert max(cached) == computed


class TestHitInsideABlock:
    """A third one, where a Mamba block is wider than a hash block: a hit inside the block, then a long tail."""

    def run(self, worker: Any) -> list[dict[str, int]]:
        worker.add("a", words(600))
        worker.run()
        worker.add("b", words(600) + words(5000, 50_000))
        steps = []
        while worker.scheduler.requests:
            answer = worker.step()
            steps.append(dict(answer.output.num_scheduled_tokens))
            worker.deliver(answer)
        return steps

    layout = Layout(attention_block=512, mamba_block=1024, retention_interval=None)

    def test_a_resumed_block_is_filled_before_the_query_goes_on(self, states: Any) -> None:
        worker = states.ShadowWorker(Engine.build(self.layout))
        assert self.run(worker) == [{"b": 512}, {"b": 4576}]

    def test_stock_publishes_the_resumed_state_as_the_blocks_end(self, states: Any) -> None:
        worker = states.ShadowWorker(Engine.build(self.layout, "stock"))
        with pytest.raises(states.Fault, match="is cached as the state after 1024 tokens; it is not"):
            self.run(worker)


class TestWideAttentionBlocks:
    """Attention blocks wider than Mamba blocks, which no model of vLLM 0.33.0 asks for."""

    layout = Layout(attention_block=32, mamba_block=16, mtp=3, budget=256, num_blocks=60, max_model_len=1024)

    @pytest.mark.parametrize(
        "changed, prompt, named",
        [({"block_drop": True}, 112, 96), ({"retention_interval": None}, 60, 48)],
        ids=["block drop", "dense retention"],
    )
    def test_stock_names_the_prompts_checkpoint_twice(
        self, changed: dict[str, Any], prompt: int, named: int, states: Any
    ) -> None:
        worker = states.ShadowWorker(Engine.build(replace(self.layout, **changed), "stock", asynchronous=True))
        worker.add("a", words(prompt), max_tokens=20)
        with pytest.raises(states.Fault, match=f"is cached as the state after {named} tokens; it is not"):
            self.decode_before_the_prefill_is_answered(worker)

    def decode_before_the_prefill_is_answered(self, worker: Any) -> None:
        for answer in (worker.step(), worker.step()):
            worker.deliver(answer)
        worker.run()

    def test_the_scheduler_refuses_them(self) -> None:
        with pytest.raises(ValueError, match=rf"Mamba blocks of 16 tokens .* the 32 .*set {SPLIT_TARGET} .*{GATE}=0"):
            Engine.build(self.layout)
