# SPDX-License-Identifier: Apache-2.0
"""Replays a trace in every arm and KV cache size, and sets what was found against the two bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

# The platform first: see there.
from vllm_kda_prefill.planning import Layout  # isort: skip

from vllm_kda_prefill.trace.arrivals import Arrivals, AtOnce, Recorded
from vllm_kda_prefill.trace.bounds import UnitPrompt, foresight_tokens, in_units, unbounded_tokens
from vllm_kda_prefill.trace.prompts import Trace
from vllm_kda_prefill.trace.replay import Replay, replay
from vllm_kda_prefill.trace.state_counts import StateKind


@dataclass(frozen=True)
class Load:
    """How requests come.

    Attributes:
        concurrent: So many at a time, unless `speed` is given.
        speed: At their recorded times, so many times as fast.
        prefill_rate: Prefill tokens a second of the server that `speed` is for.
    """

    concurrent: int = 1
    speed: float | None = None
    prefill_rate: float = 20_000.0

    def arrivals(self, trace: Trace) -> Arrivals:
        """A fresh clock for one replay."""
        if self.speed is None:
            return AtOnce(self.concurrent)
        return Recorded(trace.prompts, self.speed, self.prefill_rate)

    def __str__(self) -> str:
        if self.speed is not None:
            return f"recorded times x {self.speed:g}, {self.prefill_rate:,.0f} prefill tokens/s"
        return "one at a time" if self.concurrent == 1 else f"{self.concurrent} at a time"


@dataclass(frozen=True)
class Row:
    """One arm in one KV cache size.

    Attributes:
        num_blocks: Blocks of the KV cache.
        arm: Of `ARMS`.
        replay: What it did.
        foresight_tokens: What a cache of this size finds that knows all later prompts.
    """

    num_blocks: int
    arm: str
    replay: Replay
    foresight_tokens: int


@dataclass
class TraceReport:
    """Every arm in every size.

    Attributes:
        trace: The prompts.
        layout: Of the KV cache, but for its size.
        load: How requests came.
        unbounded_tokens: What a cache of no limit that can resume at every Mamba block finds.
        rows: By size, then by arm.
    """

    trace: Trace
    layout: Layout
    load: Load
    unbounded_tokens: int
    rows: list[Row] = field(default_factory=list)

    def of_prompt(self, tokens: int) -> float:
        """Tokens in parts of all prompt tokens."""
        return tokens / self.trace.tokens

    def of_unbounded(self, tokens: int) -> float | None:
        """Tokens in parts of what the unbounded cache finds; None where that is nothing."""
        return tokens / self.unbounded_tokens if self.unbounded_tokens else None

    def as_json(self) -> dict[str, Any]:
        return {
            "trace": self.trace.name,
            "requests": len(self.trace.prompts),
            "prompt_tokens": self.trace.tokens,
            "load": str(self.load),
            "layout": {
                "attention_block": self.layout.attention_block,
                "mamba_block": self.layout.mamba_block,
                "mamba_groups": self.layout.mamba_groups,
                "dcp": self.layout.dcp,
                "mtp": self.layout.mtp,
                "budget": self.layout.budget,
            },
            "unbounded_tokens": self.unbounded_tokens,
            "unbounded_share": self.of_prompt(self.unbounded_tokens),
            "rows": [self._row_as_json(row) for row in self.rows],
        }

    def _row_as_json(self, row: Row) -> dict[str, Any]:
        result, states = row.replay, row.replay.states
        return {
            "blocks": row.num_blocks,
            "arm": row.arm,
            "cached_tokens": result.cached_tokens,
            "of_prompt": self.of_prompt(result.cached_tokens),
            "of_unbounded": self.of_unbounded(result.cached_tokens),
            "of_foresight": result.cached_tokens / row.foresight_tokens if row.foresight_tokens else None,
            "foresight_tokens": row.foresight_tokens,
            "computed_tokens": result.computed_tokens,
            "steps": result.steps,
            "most_running": result.most_running,
            "states_kept": _by_kind(states.kept),
            "states_held": result.held_states,
            "states_evicted": states.evicted,
            "states_evicted_unused": states.evicted_unused,
            "hits": _by_kind(states.hits),
            "hit_tokens": _by_kind(states.hit_tokens),
        }


def _by_kind(counts: dict[StateKind, int]) -> dict[str, int]:
    return {kind.value: counts.get(kind, 0) for kind in StateKind}


def make_report(
    trace: Trace,
    layout: Layout,
    sizes: Sequence[int],
    arms: Sequence[str],
    load: Load,
    on_progress: Callable[[str, int], None] = lambda _doing, _requests: None,
) -> TraceReport:
    """Replay a trace.

    Args:
        trace: The prompts.
        layout: Of the KV cache; its number of blocks is of no matter.
        sizes: Numbers of blocks.
        arms: Of `ARMS`.
        load: How requests come.
        on_progress: Called with what is being replayed, and how many requests more of it are done.

    Raises:
        TraceError: A size cannot hold the longest prompt.
    """
    lookahead = layout.vllm_config().num_hash_lookahead_tokens
    prompts = in_units(trace, layout.mamba_block, lookahead)
    report = TraceReport(trace, layout, load, unbounded_tokens(prompts, layout.mamba_block))
    report.rows += _rows(report, prompts, sizes, arms, on_progress)
    return report


def _rows(
    report: TraceReport,
    prompts: Sequence[UnitPrompt],
    sizes: Sequence[int],
    arms: Sequence[str],
    on_progress: Callable[[str, int], None],
) -> Iterator[Row]:
    layout, trace = report.layout, report.trace
    unit_blocks = layout.mamba_block / (layout.attention_block * layout.dcp)
    for num_blocks in sizes:
        best = foresight_tokens(prompts, layout.mamba_block, num_blocks, unit_blocks, layout.mamba_groups)
        for arm in arms:
            doing = f"{num_blocks:,} blocks, {arm}"
            on_progress(doing, 0)
            result = replay(
                replace(layout, num_blocks=num_blocks),
                arm,
                trace,
                report.load.arrivals(trace),
                lambda requests, doing=doing: on_progress(doing, requests),  # type: ignore[misc]
            )
            yield Row(num_blocks, arm, result, best)
