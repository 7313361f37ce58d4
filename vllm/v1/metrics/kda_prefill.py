# SPDX-License-Identifier: Apache-2.0
"""The planner's counters in `/metrics`, beside vLLM's own.

The engine core counts; the API server exports. Between them only `SchedulerStats` travels, whose fields are
fixed, so the counters ride in its LoRA field: with the gate on, LoRA is refused and the field is empty.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from prometheus_client import Counter, Gauge

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

LABELS = ("model_name", "engine")


@cache
def _counter(name: str, documentation: str, *labels: str) -> Counter:
    return Counter(f"vllm:kda_prefill_{name}", documentation, (*LABELS, *labels))


GAUGES = {
    "pages": ("state_pages", "Free pages that hold a second-class state."),
    "share": ("state_pages_share", "Free pages that second-class states keep from the oldest other entries."),
}


@cache
def _gauge(name: str, documentation: str) -> Gauge:
    return Gauge(f"vllm:kda_prefill_{name}", documentation, LABELS, multiprocess_mode="mostrecent")


class KDAPrefillStatLogger(StatLoggerBase):
    """Turns the totals of one engine into Prometheus counters."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._labels = (str(vllm_config.model_config.served_model_name), str(engine_index))
        self._seen: dict[str, int] = {}

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        for key, total in scheduler_stats.waiting_lora_adapters.items():
            if key in GAUGES:
                _gauge(*GAUGES[key]).labels(*self._labels).set(total)
                continue
            metric, _, reason = key.partition(":")
            # Created here and not earlier: vLLM drops every registered metric of its own before it starts.
            if metric == "spans":
                counter = _counter("spans_coalesced", "Prefill spans that ran without a stop for a state.")
            elif metric == "states":
                counter = _counter("states_exported", "States exported from inside a query.")
            elif metric == "not_exported":
                counter = _counter("states_not_exported", "Wanted states that found no spare page.")
            else:
                counter = _counter("fallbacks", "Prefill spans on stock's path, by reason.", "reason")
            labels: tuple[str, ...] = (*self._labels, reason) if reason else self._labels
            counter.labels(*labels).inc(total - self._seen.get(key, 0))
            self._seen[key] = total

    def log_engine_initialized(self) -> None:
        """Nothing to say at start."""


def with_kda_prefill_logger(factories: list[Any]) -> list[Any]:
    """The stat loggers of plugins, and this one."""
    return [*factories, KDAPrefillStatLogger]
