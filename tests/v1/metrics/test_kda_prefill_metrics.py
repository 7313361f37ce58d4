"""The planner's counters on their way from the scheduler to `/metrics`."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

from vllm.v1.metrics.kda_prefill import KDAPrefillStatLogger
from vllm.v1.metrics.stats import SchedulerStats
from vllm_kda_prefill.planning import Engine, Layout


@pytest.fixture(scope="module")
def stats_of_two_prompts():
    engine = Engine.build(Layout(mamba_groups=2))
    stats = []
    for request_id, length, first in (("a", 8192, 0), ("b", 9000, 50_000)):
        engine.add(request_id, list(range(first, first + length)))
        while engine.scheduler.has_requests():
            engine.step()
        stats.append(engine.scheduler.make_stats())
    return stats


def value(name, **labels):
    labels = {"model_name": "['glm']", "engine": "7", **labels}
    return REGISTRY.get_sample_value(f"vllm:kda_prefill_{name}", labels)


def test_counters_follow_the_schedulers_totals(stats_of_two_prompts):
    config: Any = SimpleNamespace(model_config=SimpleNamespace(served_model_name=["glm"]))
    logger = KDAPrefillStatLogger(config, 7)
    logger.record(None, None)
    for stats, spans, states in zip(stats_of_two_prompts, (1, 3), (4, 8), strict=True):
        # What the API server receives: the wire knows only vLLM's own fields.
        received = msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=SchedulerStats)
        logger.record(received, None, engine_idx=7)
        assert value("spans_coalesced_total") == spans
        assert value("states_exported_total") == states
    # Three rungs of the first prompt and three of the second, in two groups, and one span end.
    assert value("state_pages") == 14
    assert value("state_pages_share") == 0
    assert value("states_not_exported_total") == 0


def test_a_fallback_is_counted_by_its_reason():
    engine = Engine.build(Layout())
    config: Any = SimpleNamespace(model_config=SimpleNamespace(served_model_name=["glm"]))
    logger = KDAPrefillStatLogger(config, 7)
    request = engine.add("a", list(range(8192)))
    request.append_output_token_ids(1)
    while engine.scheduler.has_requests():
        engine.step()
    logger.record(engine.scheduler.make_stats(), None)
    assert value("fallbacks_total", reason="replayed_output") == 1
    assert value("fallbacks_total", reason="no_room") is None
