# SPDX-License-Identifier: Apache-2.0
"""A server's /metrics, and what changed in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

QUERIES = "vllm:prefix_cache_queries_total"
HITS = "vllm:prefix_cache_hits_total"
PREEMPTIONS = "vllm:num_preemptions_total"
DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
SPANS = "vllm:kda_prefill_spans_coalesced_total"
EXPORTED = "vllm:kda_prefill_states_exported_total"
NOT_EXPORTED = "vllm:kda_prefill_states_not_exported_total"
FALLBACKS = "vllm:kda_prefill_fallbacks_total"
PROBATIONARY_BLOCKS = "vllm:kda_prefill_probationary_blocks"

KEPT = (QUERIES, HITS, PREEMPTIONS, DRAFTS, ACCEPTED, SPANS, EXPORTED, NOT_EXPORTED, FALLBACKS)
"""Counters that records keep."""

SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{.*\})?\s+(\S+)(?:\s+\d+)?$")


@dataclass(frozen=True)
class Metrics:
    """One reading: samples by name, labels left out and summed over."""

    values: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> Metrics:
        """Read Prometheus' text format."""
        values: dict[str, float] = {}
        for line in text.splitlines():
            found = SAMPLE.match(line)
            if found:
                values[found[1]] = values.get(found[1], 0.0) + float(found[2])
        return cls(values)

    def __getitem__(self, name: str) -> float:
        """A sample's value; counters that have not counted yet are not exported and are 0."""
        return self.values.get(name, 0.0)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    @property
    def coalesces(self) -> bool:
        """Whether the server exports any of this fork's metrics."""
        return any(name.startswith("vllm:kda_prefill_") for name in self.values)

    def since(self, earlier: Metrics) -> dict[str, float]:
        """How far the kept counters moved."""
        return {name: self[name] - earlier[name] for name in KEPT if name in self or name in earlier}
