# SPDX-License-Identifier: Apache-2.0
"""What is asked of vLLM's real scheduler: equal retention, growth, reuse by cache size."""

from __future__ import annotations

import pytest

# The platform first: see there.
from vllm_kda_prefill.planning import Engine, Layout  # isort: skip

from vllm.v1.core.sched import coalescing_scheduler
from vllm.v1.metrics.kda_prefill import COUNTERS, GAUGES
from vllm_kda_prefill.bench import metrics
from vllm_kda_prefill.bench.records import read
from vllm_kda_prefill.bench.scheduler import growth, reuse
from vllm_kda_prefill.bench.scheduler.sections import sections
from vllm_kda_prefill.bench.servers import STARTED
from vllm_kda_prefill.bench.stopping_scheduler import StoppingScheduler, end_at_checkpoints
from vllm_kda_prefill.bench.workloads import Conversations
from vllm_kda_prefill.spans import query_span, retained_states


def stopping_engine(monkeypatch: pytest.MonkeyPatch, mtp: int, dcp: int = 1) -> Engine:
    """The scheduler of an equal-retention arm, as `vllm serve` builds it."""
    with monkeypatch.context() as patch:
        patch.setattr("vllm_kda_prefill.planning.Scheduler", StoppingScheduler)
        return Engine.build(Layout(mtp=mtp, dcp=dcp, mamba_groups=2), "stock")


def serve(engine: Engine, name: str, tokens: list[int]) -> tuple[list[int], int, tuple[int, ...]]:
    """Lengths of the passes, cached tokens, and states retained."""
    request = engine.add(name, tokens)
    spans = []
    while engine.scheduler.has_unfinished_requests():
        output = engine.scheduler.schedule()
        span = query_span(engine, output, name)
        assert span is not None
        spans.append(span)
        engine.answer(output)
    return [span.end - span.start for span in spans], spans[0].start, retained_states(engine, request)


@pytest.mark.parametrize("mtp", [0, 3])
@pytest.mark.parametrize(
    "length, passes",
    [(8192, [4096, 2048, 1024, 1024]), (16384, [8192, 4096, 2048, 1024, 1024])],
)
def test_equal_retention_keeps_the_states_of_ladder(monkeypatch, length, passes, mtp):
    tokens = list(range(length))
    ran, _, kept = serve(stopping_engine(monkeypatch, mtp), "a", tokens)
    _, _, wanted = serve(Engine.build(Layout(mtp=mtp, mamba_groups=2)), "a", tokens)
    assert ran == passes
    assert set(wanted) <= set(kept)


def branch_hits(engine: Engine) -> list[int]:
    """Cached tokens of prompts that leave one of 8,192 tokens."""
    base, other = list(range(8192)), list(range(100_000, 108_192))
    serve(engine, "base", base)
    return [serve(engine, str(at), base[:at] + other[at:])[1] for at in (7900, 7400, 6500, 5000)]


@pytest.mark.parametrize(
    ("dcp", "hits"),
    [(1, [7680, 7168, 6144, 4096]), (2, [7680, 7168, 6144, 4096]), (4, [7680, 6144, 6144, 4096])],
)
def test_equal_retention_hits_where_ladder_hits(monkeypatch, dcp, hits):
    """But for 7,168 at DCP4: stock's lookup returns no state inside an attention block of 2,048 tokens."""
    assert branch_hits(stopping_engine(monkeypatch, mtp=3, dcp=dcp)) == hits
    ladder = branch_hits(Engine.build(Layout(mtp=3, dcp=dcp, mamba_groups=2)))
    assert ladder == [7680, 7168, 6144, 4096]


def test_the_factory_follows_the_configuration():
    engine = Engine.build(Layout(), "stock")
    config = engine.scheduler.vllm_config
    made = end_at_checkpoints(
        vllm_config=config,
        kv_cache_config=Layout().kv_cache_config(),
        structured_output_manager=None,
        block_size=512,
        hash_block_size=512,
    )
    assert type(made) is StoppingScheduler


def test_the_gate_shows_in_the_log_and_in_the_counters(monkeypatch):
    logged: list[str] = []
    monkeypatch.setattr(coalescing_scheduler.logger, "info", lambda text, *values: logged.append(text % values))
    Engine.build(Layout(), "coalesced")
    assert any(STARTED.search(line) for line in logged)
    known = {f"vllm:kda_prefill_{name}" for name, _ in (COUNTERS | GAUGES).values()}
    assert {metrics.SPANS, metrics.EXPORTED, metrics.NOT_EXPORTED} <= {f"{name}_total" for name in known}
    assert metrics.PROBATIONARY_BLOCKS in known


def test_growth_records_what_the_schedulers_do(tmp_path):
    growth.measure([2048, 8192], dcp=1, mtp=3, block_tokens=512, output=tmp_path / "growth.jsonl")
    (section,) = sections(list(read(tmp_path / "growth.jsonl")))
    assert [row[:6] for row in section.rows] == [
        ("2,048", "1", "1", "1", "2", "2"),
        ("8,192", "1", "1", "1", "4", "4"),
    ]


def test_reuse_finds_ladder_at_or_above_stock_in_every_cache(tmp_path):
    reuse.measure(10, [0.5], 1, dcp=1, mtp=3, groups=2, seed=1, output=tmp_path / "reuse.jsonl")
    samples = [record for record in read(tmp_path / "reuse.jsonl") if record["kind"] == "sample"]
    by_part = {part: {s["arm"]: s for s in samples if s["part"] == part} for part in reuse.PARTS}
    for arms in by_part.values():
        assert set(arms) == {"stock", "ladder", "replay"}
        assert arms["ladder"]["cached"] >= arms["stock"]["cached"]
        assert arms["ladder"]["passes"] <= arms["stock"]["passes"]
    ample = by_part[1.0]
    assert {arm["evicted_states"] for arm in ample.values()} == {0}
    assert ample["ladder"]["held_states"] > ample["stock"]["held_states"]
    assert by_part[0.125]["ladder"]["evicted_states"] > 0
    assert sections(list(read(tmp_path / "reuse.jsonl")))[0].rows


def test_reuse_counts_every_prompt_token_once():
    trace = Conversations(turns=6)
    served = reuse.serve(Layout(mtp=3, num_blocks=5000), "ladder", trace)
    assert served.prompt == sum(len(turn.tokens) for turn in trace)
    assert served.cached <= sum(turn.kept if turn.kept else trace.system for turn in trace)
