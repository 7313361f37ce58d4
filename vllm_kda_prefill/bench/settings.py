# SPDX-License-Identifier: Apache-2.0
"""Which suites a run makes, and with which sizes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_kda_prefill.bench.errors import BenchError
from vllm_kda_prefill.bench.suites import branches, cold, decode
from vllm_kda_prefill.bench.workloads import Conversations

PARTS = {"cold": 3.0, "branches": 2.0, "branches-room": 1.5, "decode": 4.5, "conversations": 3.0, "growth": 1.0}
"""Suites in the order they run, and the part of the time each gets of what is left."""


@dataclass(frozen=True)
class RunSettings:
    """A run's settings; records keep them.

    Attributes:
        suites: Which, of `PARTS`.
        sizes: Prompt tokens of `cold` and of the probes.
        growth_sizes: Prompt tokens of `growth`.
        points: Where `branches` leaves its prompts.
        contexts: Prompt tokens of `decode`.
        samples: Most rounds of a suite.
        output_tokens: Tokens a request decodes.
        workload: What `conversations` serves.
        traces: Most traces of it.
        seed: Of every prompt.
        only: Suite -> arms that take part; suites not named take all.
    """

    suites: tuple[str, ...] = ("cold",)
    sizes: tuple[int, ...] = cold.SIZES
    growth_sizes: tuple[int, ...] = cold.GROWTH_SIZES
    points: tuple[int, ...] = branches.POINTS
    contexts: tuple[int, ...] = decode.CONTEXTS
    samples: int = 20
    output_tokens: int = decode.OUTPUT
    workload: Conversations = Conversations()  # noqa: RUF009  (frozen)
    traces: int = 3
    seed: int = 1
    only: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for option, suites in (("--suites", self.suites), ("--only", self.only)):
            for suite in suites:
                if suite not in PARTS:
                    raise BenchError(f"{option} {suite}: give some of {', '.join(PARTS)}")
        counts = (*self.sizes, *self.growth_sizes, *self.points, *self.contexts, self.samples, self.output_tokens)
        if not self.sizes or min(counts) < 1:
            raise BenchError("sizes, points, contexts, --samples and --output-tokens are all at least 1")
        if max(self.points, default=1) >= branches.SIZE:
            raise BenchError(f"--points {max(self.points)}: give points inside the prompt, below {branches.SIZE}")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
