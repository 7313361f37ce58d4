# SPDX-License-Identifier: Apache-2.0
"""What a scheduler output carries, and when a prefill keeps stock's span."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import msgspec
import pytest

from tests.v1.core.driving import build, evict_states, prefill, words
from vllm.v1.core.prefill_plan import PrefillPlan
from vllm.v1.core.prefill_plan_stats import Fallback
from vllm.v1.request import RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder


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
    def test_a_block_unrelated_to_tokens_takes_no_room(self, waiting: int) -> None:
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
