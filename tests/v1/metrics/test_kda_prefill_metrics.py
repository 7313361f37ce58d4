# SPDX-License-Identifier: Apache-2.0
"""The planner's counters on their way from the scheduler to `/metrics`."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

from vllm.v1.metrics.kda_prefill import KDAPrefillStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm_kda_prefill.planning import Engine, Layout


def stats_of(engine):
    """What the engine core reports, a step at a time, as an API server receives it."""
    reported = []
    make_stats = engine.scheduler.make_stats

    def make_and_report(*arguments, **more):
        stats = make_stats(*arguments, **more)
        # The wire knows only vLLM's own fields.
        reported.append(msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=SchedulerStats))
        return stats

    engine.scheduler.make_stats = make_and_report
    while engine.scheduler.has_requests():
        engine.step()
    engine.scheduler.make_stats = make_stats
    return reported


@pytest.fixture(scope="module")
def stats_of_two_prompts():
    engine = Engine.build(Layout(mamba_groups=2))
    stats = []
    for request_id, length, first in (("a", 8192, 0), ("b", 9000, 50_000)):
        engine.add(request_id, list(range(first, first + length)), max_tokens=4)
        stats.append(stats_of(engine))
    return stats


def logger_of(engine):
    config: Any = SimpleNamespace(model_config=SimpleNamespace(served_model_name=["glm"]))
    return KDAPrefillStatLogger(config, engine)


def value(name, engine, **labels):
    labels = {"model_name": "['glm']", "engine": str(engine), **labels}
    return REGISTRY.get_sample_value(f"vllm:kda_prefill_{name}", labels)


@pytest.mark.parametrize("servers", [1, 2])
def test_counters_of_all_api_servers_add_up_to_the_schedulers(stats_of_two_prompts, servers):
    loggers = [logger_of(servers) for _ in range(servers)]
    loggers[0].record(None, None)
    for reported, spans, states in zip(stats_of_two_prompts, (1, 3), (4, 8), strict=True):
        assert len(reported) > 2
        for number, stats in enumerate(reported):
            loggers[number % servers].record(stats, None)
        assert value("spans_coalesced_total", servers) == spans
        assert value("states_exported_total", servers) == states
    # Three checkpoints of the first prompt and three of the second, in two groups, and one span end.
    assert value("probationary_blocks", servers) == 14
    assert value("probationary_quota", servers) == 0
    assert value("states_not_exported_total", servers) == 0


def test_counters_are_there_before_anything_is_counted():
    engine = Engine.build(Layout())
    logger_of(5).record(engine.scheduler.make_stats(), None)
    for name in ("spans_coalesced_total", "states_exported_total", "states_not_exported_total", "probationary_blocks"):
        assert value(name, 5) == 0


def test_a_fallback_is_counted_by_its_reason():
    engine = Engine.build(Layout())
    request = engine.add("a", list(range(8192)))
    request.append_output_token_ids(1)
    logger = logger_of(7)
    for stats in stats_of(engine):
        logger.record(stats, None)
    assert value("fallbacks_total", 7, reason="replayed_output") == 1
    assert value("fallbacks_total", 7, reason="no_room") is None


def test_another_engine_in_the_same_process_is_counted_too(stats_of_two_prompts):
    logger_of(3).record(stats_of_two_prompts[0][0], None)
    assert value("spans_coalesced_total", 3) == 1
    unregister_vllm_metrics()
    assert value("spans_coalesced_total", 3) is None
    logger_of(3).record(stats_of_two_prompts[0][0], None)
    assert value("spans_coalesced_total", 3) == 1
