# SPDX-License-Identifier: Apache-2.0
"""What the scheduler remembers of a request's prefill while it puts one step together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.prefill_plan_stats import Fallback


@dataclass(frozen=True)
class StepPrefill:
    """A prefill of the current step.

    Attributes:
        start: First token of its query span.
        end: One past the last token of the span that was proposed; the step may run fewer tokens.
        is_admission: Whether the step admits the request.
        fallback: Why the proposed span is stock's own and exports stock's checkpoint at most, or None.
        shared_states: Hash -> position of the states that stock would have published in this step, at a stop inside
            the span.
    """

    start: int
    end: int
    is_admission: bool
    fallback: Fallback | None = None
    shared_states: Mapping[BlockHash, int] = field(default_factory=dict)
