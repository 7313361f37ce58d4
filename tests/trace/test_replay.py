# SPDX-License-Identifier: Apache-2.0
"""Recorded prompts through vLLM's real scheduler: tiny traces whose numbers are computed by hand."""

from __future__ import annotations

import pytest

# The platform first: see there.
from vllm_kda_prefill.planning import Engine, Layout  # isort: skip

from tests.trace.by_hand import make_trace
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm_kda_prefill.trace.arrivals import AtOnce, Recorded
from vllm_kda_prefill.trace.errors import TraceError
from vllm_kda_prefill.trace.prompts import Trace
from vllm_kda_prefill.trace.replay import ARMS, Replay, replay
from vllm_kda_prefill.trace.report import Load, make_report
from vllm_kda_prefill.trace.state_counts import StateKind

TAIL, JUNCTION, SPAN_END, CHECKPOINT = StateKind.TAIL, StateKind.JUNCTION, StateKind.SPAN_END, StateKind.CHECKPOINT
MAIN = list(range(1, 17))
OTHER = list(range(101, 117))

LAYOUT = Layout(num_blocks=500)

# A prompt of 8,192 tokens; one that leaves it at 6,144; that one again.
BRANCH = make_trace((8192, MAIN), (8192, MAIN[:12] + OTHER[:4]), (8192, MAIN[:12] + OTHER[:4]))


def serve(arm: str, trace: Trace, concurrent: int = 1, layout: Layout = LAYOUT) -> Replay:
    return replay(layout, arm, trace, AtOnce(concurrent))


def test_a_prompt_again_resumes_at_its_tail():
    # 2,148 tokens: the last whole block before the last token ends at 2,048.
    result = serve("stock", make_trace((2148, [1, 2, 3, 4, 5]), (2148, [1, 2, 3, 4, 5])))
    assert (result.prompt_tokens, result.cached_tokens, result.computed_tokens) == (4296, 2048, 2248)
    assert (result.steps, result.most_running) == (2, 1)
    assert result.states.kept == {TAIL: 1}
    assert result.states.hits == {TAIL: 1}
    assert result.states.hit_tokens == {TAIL: 2048}
    assert (result.held_states, result.states.evicted) == (1, 0)


def test_stock_finds_no_state_at_a_junction_and_keeps_one_there():
    result = serve("stock", BRANCH)
    assert result.cached_tokens == 0 + 0 + 7680
    assert result.computed_tokens == 3 * 8192 - 7680
    # The second prompt stops at 6,144, and so takes two passes.
    assert result.steps == 1 + 2 + 1
    assert result.states.kept == {TAIL: 2, JUNCTION: 1}
    assert result.states.hits == {TAIL: 1}


def test_ladder_finds_the_checkpoint_there():
    result = serve("ladder", BRANCH)
    assert result.cached_tokens == 0 + 6144 + 7680
    assert result.computed_tokens == 3 * 8192 - 6144 - 7680
    assert result.steps == 3
    # 4,096, 6,144 and 7,168 inside the first prompt; 7,168 inside the second.
    assert result.states.kept == {TAIL: 2, CHECKPOINT: 3 + 1}
    assert result.states.hits == {CHECKPOINT: 1, TAIL: 1}
    assert result.states.hit_tokens == {CHECKPOINT: 6144, TAIL: 7680}


def test_a_state_where_a_pass_ends_anyway_is_a_span_end():
    # Of 16,384 tokens the ladder keeps 8,192, where the first pass of 8,192 tokens ends.
    ids = list(range(1, 33))
    result = serve("ladder", make_trace((16384, ids), (8704, [*ids[:16], 99])))
    assert result.cached_tokens == 8192
    assert result.states.hits == {SPAN_END: 1}


def test_a_state_is_kept_held_or_evicted_and_a_hit_one_no_waste():
    once = [(1025, [100 + 3 * number, 101 + 3 * number, 102 + 3 * number]) for number in range(20)]
    trace = make_trace((1025, [1, 2, 3]), (1025, [1, 2, 3]), *once)
    result = serve("stock", trace, layout=Layout(num_blocks=12))
    assert result.cached_tokens == 1024
    assert result.states.kept == {TAIL: 21}
    assert result.held_states + result.states.evicted == 21
    assert 0 < result.held_states < 4
    # The first prompt's state was used.
    assert result.states.evicted_unused == result.states.evicted - 1


@pytest.mark.parametrize(
    "layout",
    [
        Layout(num_blocks=60, mamba_groups=2),
        # Equal prompts run side by side, and each has the same state.
        Layout(num_blocks=90, mamba_groups=2, budget=2048, long_prefill_threshold=1024),
        # States end inside a Mamba block, which the next pass writes on.
        Layout(num_blocks=60, mamba_groups=2, mamba_block=1024, budget=1024),
    ],
)
@pytest.mark.parametrize("arm", ARMS)
def test_counts_are_those_of_the_cache_itself(arm, layout, monkeypatch):
    """Many prompts in a small cache: what is said to be held is held."""
    engines = []
    build = Engine.build

    def note_engine(*args) -> Engine:
        engines.append(build(*args))
        return engines[-1]

    monkeypatch.setattr(Engine, "build", note_engine)
    prompts = [(4096 + 612, [1, *range(number // 2 % 7 * 100, number // 2 % 7 * 100 + 9)]) for number in range(60)]
    result = serve(arm, make_trace(*prompts), concurrent=4, layout=layout)
    (engine,) = engines[1:]  # The first serves the longest prompt alone.
    cached = engine.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
    names = [name for name in cached._cache if get_group_id(name) == 1]
    assert len(names) == result.held_states > 0
    assert result.states.kept.total() == result.held_states + result.states.evicted
    assert result.states.hit_tokens.total() == result.cached_tokens > 0
    assert result.states.evicted >= result.states.evicted_unused
    assert result.states.evicted > 0


def test_a_state_that_moves_between_blocks_is_not_new_or_gone():
    """A prompt resumes at a state inside a Mamba block, and writes on in this block: stock moves the state's entry."""
    ids = list(range(9))
    trace = make_trace((4708, [*ids, 9]), (4708, [*ids, 9]), (5200, [*ids, 77, 78]))
    result = serve("stock", trace, layout=Layout(num_blocks=500, mamba_block=1024, budget=1024))
    assert result.cached_tokens == 4096 + 4608
    assert result.states.kept == {TAIL: 2, SPAN_END: 1}
    assert (result.held_states, result.states.evicted) == (3, 0)


@pytest.mark.parametrize("mtp", [0, 3])
@pytest.mark.parametrize("dcp", [1, 4])
@pytest.mark.parametrize("arm", ["stock", "ladder"])
def test_ids_find_what_tokens_find(arm, dcp, mtp):
    """The same prompts as tokens, hashed by vLLM."""
    prompts = [
        (8192, MAIN),
        (8192, MAIN),
        (6000, [*MAIN[:10], *OTHER[:2]]),
        (5121, [*MAIN[:10], OTHER[5]]),
        (5120, MAIN[:10]),
        (8192, [*MAIN[:4], *OTHER[:12]]),
        (9000, [*MAIN, 201, 202]),
    ]
    layout = Layout(dcp=dcp, mtp=mtp, mamba_groups=2, num_blocks=900)
    engine = Engine.build(layout, *ARMS[arm])
    cached = 0
    for number, (length, ids) in enumerate(prompts):
        engine.add(str(number), [block for block in ids for _ in range(512)][:length])
        while engine.scheduler.has_unfinished_requests():
            cached += sum(new.num_computed_tokens for new in engine.step().scheduled_new_reqs)
    result = replay(layout, arm, make_trace(*prompts), AtOnce())
    assert result.cached_tokens == cached > 7000


def test_some_at_a_time_share_steps():
    trace = make_trace(*[(1000, [2 * number, 2 * number + 1]) for number in range(8)])
    one, four = serve("ladder", trace), serve("ladder", trace, concurrent=4)
    assert (one.steps, one.most_running) == (8, 1)
    assert (four.steps, four.most_running) == (2, 4)
    assert one.computed_tokens == four.computed_tokens == 8000


def test_recorded_times_let_requests_overlap_and_queue():
    # While the first prompt's 4,096 tokens take two seconds, the two others come and then run together.
    trace = make_trace(*[(4096, [8 * number + block for block in range(8)]) for number in range(3)], times=[0, 1, 2])
    layout = Layout(num_blocks=500)
    result = replay(layout, "ladder", trace, Recorded(trace.prompts, 1, 2048))
    assert (result.steps, result.most_running) == (2, 2)
    apart = replay(layout, "ladder", trace, Recorded(trace.prompts, 1, 1_000_000))
    assert (apart.steps, apart.most_running) == (3, 1)


def test_what_a_preempted_request_finds_of_its_own_is_no_hit(monkeypatch):
    """A prompt of nine steps is preempted after the eighth, as vLLM does where decoding requests need its blocks."""
    build, steps = Engine.build, []

    def build_preempting(*args) -> Engine:
        engine = build(*args)
        schedule, scheduler = engine.scheduler.schedule, engine.scheduler

        def preempting():
            steps.append(scheduler)
            if steps.count(scheduler) == 9 and len(set(map(id, steps))) == 2:
                scheduler._preempt_request(scheduler.running.pop(), 0.0)
            return schedule()

        scheduler.schedule = preempting
        return engine

    monkeypatch.setattr(Engine, "build", build_preempting)
    result = serve("stock", make_trace((8292, [*MAIN, 17]), (8292, [*MAIN, 17])), layout=Layout(budget=1024))
    # It resumes at the state that it has just left at 8,192; the second prompt does so as well.
    assert result.cached_tokens == 8192
    assert result.states.hits == {TAIL: 1}
    assert result.computed_tokens == 8292 + 100
    assert result.steps == 9 + 1


def test_a_cache_too_small_for_the_longest_prompt_is_refused():
    trace = make_trace((600, [7, 8]), (8192, MAIN))
    with pytest.raises(TraceError, match="12 blocks do not hold a prompt of 8192 tokens: give more blocks"):
        serve("ladder", trace, layout=Layout(num_blocks=12))


def test_a_report_sets_each_arm_against_both_bounds():
    progress = []
    report = make_report(
        BRANCH, Layout(), [500, 20], ["stock", "ladder"], Load(), lambda doing, done: progress.append((doing, done))
    )
    # The second prompt parts at 6,144; the third repeats it, but for its last block.
    assert report.unbounded_tokens == 6144 + 7680
    assert report.of_prompt(report.unbounded_tokens) == (6144 + 7680) / (3 * 8192)
    rows = {(row["blocks"], row["arm"]): row for row in report.as_json()["rows"]}
    assert rows[500, "stock"]["of_unbounded"] == 7680 / 13824
    assert rows[500, "ladder"]["of_unbounded"] == rows[500, "ladder"]["of_foresight"] == 1
    assert rows[500, "ladder"]["hits"] == {"tail": 1, "junction": 0, "span end": 0, "checkpoint position": 1}
    # 15 blocks of attention and a state at the tail, the other at 6,144: 17 of the 20 blocks.
    assert rows[20, "stock"]["foresight_tokens"] == 13824
    assert {doing for doing, _ in progress} == {
        f"{size} blocks, {arm}" for size in (500, 20) for arm in ARMS if arm != "replay"
    }
    assert sum(done for _, done in progress) == 2 * 2 * 3


def test_a_trace_with_nothing_to_find_has_no_share_of_it():
    report = make_report(make_trace((600, [1, 2])), Layout(), [100], ["stock"], Load())
    (row,) = report.as_json()["rows"]
    assert row["of_unbounded"] is row["of_foresight"] is None
    assert row["cached_tokens"] == row["of_prompt"] == 0
