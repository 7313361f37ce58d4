# SPDX-License-Identifier: Apache-2.0
"""The suites of a run, one after the other, and how they divide its time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from vllm_kda_prefill.bench.arms import arm_of
from vllm_kda_prefill.bench.budget import Budget
from vllm_kda_prefill.bench.errors import BenchError
from vllm_kda_prefill.bench.records import Recorder
from vllm_kda_prefill.bench.servers import Server
from vllm_kda_prefill.bench.settings import PARTS, RunSettings
from vllm_kda_prefill.bench.suites import branches, cold, conversations, decode

ENDING = 2.0
"""Seconds in which a server ends that has broken off its answer."""


async def run_suites(
    settings: RunSettings, servers: Sequence[Server], recorder: Recorder, budget: Budget, keep_going: bool = False
) -> list[str]:
    """Run the suites of a run, each in its part of what is left of the budget.

    Returns:
        Suites that failed and arms whose server ended, with `keep_going`.

    Raises:
        BenchError: A suite failed or a server ended, without `keep_going`.
    """
    failed: list[str] = []
    servers = list(servers)
    pending = [suite for suite in PARTS if suite in settings.suites]
    while pending:
        suite = pending[0]
        servers = _living(servers, recorder, keep_going, failed)
        part = budget.share(PARTS[suite] / sum(PARTS[name] for name in pending))
        names = settings.only.get(suite)
        taking_part = [server for server in servers if names is None or arm_of(server.name) in names]
        try:
            before, seconds = recorder.samples, part.left
            await _run_suite(suite, settings, taking_part, recorder, part)
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
    """The servers whose process has not ended.

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


async def _run_suite(
    suite: str, settings: RunSettings, servers: Sequence[Server], recorder: Recorder, budget: Budget
) -> None:
    if not servers:
        return
    samples, seed = settings.samples, settings.seed
    if suite == "cold":
        await cold.run(servers, settings.sizes, samples, seed, recorder, budget)
    elif suite in ("branches", branches.ROOM):
        await branches.run(servers, settings.points, samples, seed, recorder, budget, suite)
    elif suite == "conversations":
        await conversations.run(servers, settings.workload, settings.traces, recorder, budget)
    elif suite == "decode":
        contexts, output = settings.contexts, settings.output_tokens
        await decode.run(servers, contexts, decode.CONCURRENCIES, samples, output, seed, recorder, budget)
    else:
        await cold.run(servers, settings.growth_sizes, min(samples, 5), seed, recorder, budget, suite)
