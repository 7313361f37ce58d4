# SPDX-License-Identifier: Apache-2.0
"""Which suites a run makes, with their sizes, and how they share its time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_kda_prefill.bench.arms import arm_of
from vllm_kda_prefill.bench.budget import Budget
from vllm_kda_prefill.bench.errors import BenchError
from vllm_kda_prefill.bench.records import Recorder
from vllm_kda_prefill.bench.servers import Server
from vllm_kda_prefill.bench.suites import branches, cold, conversations, decode
from vllm_kda_prefill.bench.workloads import Conversations

SHARES = {"cold": 3.0, "branches": 2.0, "branches-room": 1.5, "decode": 4.5, "conversations": 3.0, "growth": 1.0}
"""Suites in the order they run, and the part of the time each gets of what is left."""


@dataclass(frozen=True)
class Plan:
    """A run's settings; records keep them.

    Attributes:
        suites: Which, of `SHARES`.
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
                if suite not in SHARES:
                    raise BenchError(f"{option} {suite}: give some of {', '.join(SHARES)}")
        counts = (*self.sizes, *self.growth_sizes, *self.points, *self.contexts, self.samples, self.output_tokens)
        if not self.sizes or min(counts) < 1:
            raise BenchError("sizes, points, contexts, --samples and --output-tokens are all at least 1")
        if max(self.points, default=1) >= branches.SIZE:
            raise BenchError(f"--points {max(self.points)}: give points inside the prompt, below {branches.SIZE}")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


ENDING = 2.0
"""Seconds in which a server ends that has broken off its answer."""


async def run(
    plan: Plan, servers: Sequence[Server], recorder: Recorder, budget: Budget, keep_going: bool = False
) -> list[str]:
    """Run the plan's suites, each in its share of what is left of the budget.

    Returns:
        Suites that failed and arms whose server ended, with `keep_going`.

    Raises:
        BenchError: A suite failed or a server ended, without `keep_going`.
    """
    failed: list[str] = []
    servers = list(servers)
    pending = [suite for suite in SHARES if suite in plan.suites]
    while pending:
        suite = pending[0]
        servers = _living(servers, recorder, keep_going, failed)
        share = budget.share(SHARES[suite] / sum(SHARES[name] for name in pending))
        names = plan.only.get(suite)
        taking_part = [server for server in servers if names is None or arm_of(server.name) in names]
        try:
            before, seconds = recorder.samples, share.left
            await _run_suite(suite, plan, taking_part, recorder, share)
            if taking_part and recorder.samples == before:
                raise BenchError(f"{suite}: no sample in its {seconds:.0f} s; give more --seconds or fewer suites")
        except BenchError as error:
            if not keep_going:
                raise
            recorder.add("failure", suite=suite, error=str(error))
            failed.append(f"suite {suite} ({error})")
            # A server that broke off its answer may be ending, and is not asked again.
            await asyncio.sleep(ENDING)
        pending.pop(0)
    return failed


def _living(servers: list[Server], recorder: Recorder, keep_going: bool, failed: list[str]) -> list[Server]:
    """The servers whose servers have not ended.

    Raises:
        BenchError: One has, without `keep_going`.
    """
    living = []
    for server in servers:
        if server.is_up:
            living.append(server)
            continue
        error = BenchError(f"arm {server.name}: its server ended while it was measured; see its log")
        if not keep_going:
            raise error
        recorder.add("left out", arm=server.name, error=str(error))
        failed.append(server.name)
    return living


async def _run_suite(suite: str, plan: Plan, servers: Sequence[Server], recorder: Recorder, budget: Budget) -> None:
    if not servers:
        return
    if suite == "cold":
        await cold.run(servers, plan.sizes, plan.samples, plan.seed, recorder, budget)
    elif suite in ("branches", branches.ROOM):
        await branches.run(servers, plan.points, plan.samples, plan.seed, recorder, budget, suite)
    elif suite == "conversations":
        await conversations.run(servers, plan.workload, plan.traces, recorder, budget)
    elif suite == "decode":
        contexts, output = plan.contexts, plan.output_tokens
        await decode.run(servers, contexts, decode.CONCURRENCIES, plan.samples, output, plan.seed, recorder, budget)
    else:
        await cold.run(servers, plan.growth_sizes, min(plan.samples, 5), plan.seed, recorder, budget, suite)
