# SPDX-License-Identifier: Apache-2.0
"""The planner's counters in `/metrics`, beside vLLM's own.

The engine core counts; the API server exports. Between them only `SchedulerStats` travels, whose fields are fixed, and
both of its free-form fields belong to connectors. So the counters ride in its LoRA field: with the gate on, LoRA is
refused and the field is empty. docs/upstream.md says what vLLM lacks.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

from prometheus_client import REGISTRY, Counter, Gauge

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

LABELS = ("model_name", "engine")
Metric = TypeVar("Metric", Counter, Gauge)


def _registered(kind: type[Metric], name: str, documentation: str, *labels: str, **options: Any) -> Metric:
    """The metric of this name that Prometheus knows now: vLLM drops all of them when another engine starts."""
    name = f"vllm:kda_prefill_{name}"
    known = REGISTRY._names_to_collectors.get(name)
    return kind(name, documentation, (*LABELS, *labels), **options) if known is None else cast(Any, known)


COUNTERS = {
    "spans": ("spans_coalesced", "Prefill spans that ran without a stop for a state."),
    "states": ("states_exported", "States exported from inside a query."),
    "not_exported": ("states_not_exported", "Wanted states that found no block, or were cached already."),
}
GAUGES = {
    "probationary_blocks": ("probationary_blocks", "Free blocks that hold a probationary state."),
    "probationary_quota": ("probationary_quota", "Free blocks that probationary states keep from other entries."),
}


class KDAPrefillStatLogger(StatLoggerBase):
    """Exports what one engine counted.

    An engine with several API servers tells one of them what changed in a step, now this one and now that. So changes
    are told and not totals: each server adds its part, and Prometheus adds the parts up.
    """

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._labels = (str(vllm_config.model_config.served_model_name), str(engine_index))
        self._metrics: dict[str, Counter | Gauge] = {}

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        for key, value in scheduler_stats.waiting_lora_adapters.items():
            metric = self._metrics.get(key)
            if metric is None:
                # Created here and not earlier: vLLM drops every registered metric of its own before it starts.
                metric = self._metrics[key] = self._metric(key)
            if isinstance(metric, Gauge):
                metric.set(value)
            else:
                metric.inc(value)

    def _metric(self, key: str) -> Counter | Gauge:
        """What the scheduler's `key` is exported as, with this engine's labels."""
        if key in GAUGES:
            return _registered(Gauge, *GAUGES[key], multiprocess_mode="mostrecent").labels(*self._labels)
        kind, _, reason = key.partition(":")
        if kind == "fallbacks":
            counter = _registered(Counter, "fallbacks", "Prefill spans on stock's path, by reason.", "reason")
            return counter.labels(*self._labels, reason)
        return _registered(Counter, *COUNTERS[kind]).labels(*self._labels)

    def log_engine_initialized(self) -> None:
        """Nothing to say at start."""


def with_kda_prefill_logger(factories: list[Any]) -> list[Any]:
    """The stat loggers of plugins, and this one."""
    return [*factories, KDAPrefillStatLogger]
