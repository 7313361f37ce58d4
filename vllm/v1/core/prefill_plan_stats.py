# SPDX-License-Identifier: Apache-2.0
"""What the planner did: counters by reason, and a log of the first plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from vllm.v1.core.prefill_plan import PlanLog, PrefillPlan


class Fallback(StrEnum):
    """Why a prefill span took stock's path."""

    UNALIGNED_START = "unaligned_start"
    ENCODER_INPUT = "encoder_input"
    EXTERNAL_LOAD = "external_load"
    REPLAYED_OUTPUT = "replayed_output"
    NO_ROOM = "no_room"
    SPAN_CHANGED = "span_changed"


@dataclass
class PrefillPlanStats:
    """Counts since the engine started.

    Attributes:
        spans: Prefill spans that ran without a stop for a state.
        states: States those spans exported.
        states_without_block: States that were wanted and found no block (or were cached already).
        fallbacks: Prefill spans on stock's path, by reason.
    """

    spans: int = 0
    states: int = 0
    states_without_block: int = 0
    fallbacks: Counter[Fallback] = field(default_factory=Counter)
    _taken: dict[str, int] = field(default_factory=dict)
    _levels: dict[str, int] = field(default_factory=dict)
    _log: PlanLog = field(default_factory=PlanLog)

    def record_span(self, exported: int, not_exported: int) -> None:
        self.spans += 1
        self.states += exported
        self.states_without_block += not_exported

    def record_fallback(self, reason: Fallback) -> None:
        self.fallbacks[reason] += 1

    def totals(self) -> dict[str, int]:
        """The counts by name; a fallback's name is `fallbacks:` and its reason."""
        counts = {"spans": self.spans, "states": self.states, "not_exported": self.states_without_block}
        return counts | {f"fallbacks:{reason}": count for reason, count in self.fallbacks.items()}

    def take_changes(self, levels: Mapping[str, int]) -> dict[str, int]:
        """What was added to each count since this was last called, and each of `levels` that is another now, by name;
        the first time, every one of both."""
        totals = self.totals()
        if totals == self._taken and levels == self._levels:
            return {}  # Most steps.
        taken, self._taken = self._taken, totals
        known, self._levels = self._levels, dict(levels)
        added = {name: count - taken.get(name, 0) for name, count in totals.items() if count != taken.get(name)}
        return added | {name: level for name, level in levels.items() if level != known.get(name)}

    def log_plan(self, request_id: str, plan: PrefillPlan) -> None:
        """Log one plan, as long as the configured number of them is not reached."""
        self._log.line(
            "KDA prefill plan: request %s, query [%d, %d), checkpoints %s, blocks %s",
            request_id,
            plan.start,
            plan.end,
            list(plan.positions),
            dict(plan.block_ids),
        )
