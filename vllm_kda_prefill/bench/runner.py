# SPDX-License-Identifier: Apache-2.0
"""Runs: against one server that is there, and against arms that are started, proven and ended here."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

from vllm_kda_prefill.bench.arms import Arm, arm_of
from vllm_kda_prefill.bench.budget import Budget
from vllm_kda_prefill.bench.client import Client
from vllm_kda_prefill.bench.errors import BenchError
from vllm_kda_prefill.bench.metrics import Metrics
from vllm_kda_prefill.bench.records import Recorder
from vllm_kda_prefill.bench.server_process import SERVE, SERVED_NAME, ServerProcess
from vllm_kda_prefill.bench.servers import Server, check_after, check_before
from vllm_kda_prefill.bench.settings import RunSettings
from vllm_kda_prefill.bench.suites import warm_up
from vllm_kda_prefill.bench.suites.run import run_suites

SHUTDOWN = 25.0
"""Seconds kept for ending the servers."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def measure_servers(
    settings: RunSettings, servers: Sequence[Server], recorder: Recorder, budget: Budget, keep_going: bool = False
) -> list[str]:
    """Warm up and probe every server, prove what each is, run the suites, and prove it again.

    Returns:
        Arms and suites that failed, with `keep_going`.

    Raises:
        BenchError: A server is not what it says, or without `keep_going` a suite failed.
    """
    say("warm-ups and probes")
    failures: list[str] = []
    ready: list[tuple[Server, Metrics, int]] = []
    for server in servers:
        try:
            reading = await _prepare(server, servers, settings, recorder)
        except BenchError as error:
            if not keep_going or len(failures) + 1 == len(servers):
                raise
            failures.append(server.name)
            say(f"left out: {error}")
            recorder.add("left out", arm=server.name, error=str(error))
        else:
            ready.append((server, reading, server.cold_prefills))
    say(f"{', '.join(settings.suites)}: {budget.left:.0f} s left")
    failures += await run_suites(settings, [server for server, _, _ in ready], recorder, budget, keep_going)
    for server, reading, cold in ready:
        try:
            await check_after(server, reading, cold, recorder)
        except BenchError as error:
            if not keep_going:
                raise
            # What it measured stays in the file, marked as unproven.
            recorder.add("left out", arm=server.name, error=f"arm {server.name}, after it was measured: {error}")
            if server.name not in failures:
                failures.append(server.name)
    return failures


async def _prepare(server: Server, servers: Sequence[Server], settings: RunSettings, recorder: Recorder) -> Metrics:
    """Warm-ups, probes and the proof; returns the counters after them."""
    if set(settings.suites) - {"conversations"}:
        await warm_up.warm_up(server, settings.sizes, settings.seed)
    await warm_up.probe(server, settings.sizes, settings.seed, recorder)
    if server.arm is not None and server.arm.equal_to:
        other = _like(server.arm.equal_to, servers)
        await warm_up.probe_equal_retention(server, other, settings.sizes[0], settings.seed, recorder)
    return await check_before(server, recorder)


def _like(name: str, servers: Sequence[Server]) -> Server:
    """The server of that name, or where it is not up another one of its arm.

    Raises:
        BenchError: None is up.
    """
    found = [server for server in servers if arm_of(server.name) == arm_of(name) and server.is_up]
    if not found:
        raise BenchError(f"arm {arm_of(name)} is not up, and the arm that has to keep its states is left out with it")
    return next((server for server in found if server.name == name), found[0])


async def measure_url(
    url: str,
    model: str,
    settings: RunSettings,
    output: Path,
    seconds: float,
    name: str = "server",
    transport: httpx.AsyncBaseTransport | None = None,
) -> None:
    """Measure a server that is there; records call it `name`.

    Raises:
        BenchError: It cannot be measured.
    """
    client = Client(url, model, transport)
    try:
        await client.find_model()
        version = await client.version()
        with Recorder(
            output, {"url": url, "model": client.model, "server_version": version, **settings.as_json()}
        ) as to:
            await measure_servers(settings, [Server(name, client)], to, Budget(seconds))
    finally:
        await client.close()


async def measure_arms(
    arms: Sequence[Arm],
    model: str,
    arguments: list[str],
    settings: RunSettings,
    output: Path,
    logs: Path,
    seconds: float,
    start_seconds: float,
    keep_going: bool = False,
    serve: tuple[str, ...] = SERVE,
    processors: int = 0,
) -> None:
    """Start every arm's server at once, measure them in turns, and end them.

    Args:
        arms: How each is started.
        model: What `vllm serve` takes.
        arguments: More arguments for all of them.
        settings: What to measure.
        output: File of records.
        logs: Folder of the servers' logs.
        seconds: Wall-clock time of everything.
        start_seconds: Part of it that the servers have to start.
        keep_going: Leave out an arm that does not start or is not what it says, and go on after a suite that
            fails; fail in the end.
        serve: The command that serves.
        processors: How many each server has to itself; this process then keeps to the others. 0: as they come.

    Raises:
        BenchError: Processors are too few, a server does not start, an arm is not what it says, or a sample cannot
            be believed.
    """
    own = _processors(len(arms), processors)
    budget = Budget(seconds - SHUTDOWN)
    processes: list[ServerProcess] = []
    servers: list[Server] = []
    try:
        for arm, set_of_its_own in zip(arms, own, strict=True):
            processes.append(ServerProcess(arm, model, arguments, logs, serve, set_of_its_own))
        configuration = {
            "model": model,
            "arms": {s.arm.name: {"environment": dict(s.arm.environment), "command": s.command} for s in processes},
            "processors": processors,
            **settings.as_json(),
        }
        with Recorder(output, configuration) as recorder:
            say(f"starting {', '.join(arm.name for arm in arms)}")
            failures = await _wait(processes, start_seconds, keep_going, recorder)
            for process in processes:
                if process.arm.name not in failures:
                    servers.append(Server(process.arm.name, Client(process.url, SERVED_NAME), process.arm, process))
            try:
                async with asyncio.timeout(budget.left + SHUTDOWN / 2):
                    failures += await measure_servers(settings, servers, recorder, budget, keep_going)
            except TimeoutError:
                raise BenchError(f"not done after {seconds:.0f} s; give more --seconds or fewer suites") from None
            if failures:
                raise BenchError(f"not measured: {', '.join(failures)}; what was is in {output}")
    finally:
        for server in servers:
            await server.client.close()
        await asyncio.gather(*(asyncio.to_thread(process.stop) for process in processes))


def _processors(servers: int, each: int) -> list[set[int]]:
    """A set of processors for each server; with any, this process leaves them to the servers.

    Raises:
        BenchError: They would leave none for this process.
    """
    if not each:
        return [set() for _ in range(servers)]
    here = sorted(os.sched_getaffinity(0))
    if servers * each >= len(here):
        raise BenchError(
            f"--processors {each}: servers {servers} x {each} and one for the client are more than the {len(here)} "
            f"processors here; give at most {(len(here) - 1) // servers}"
        )
    os.sched_setaffinity(0, here[servers * each :])
    return [set(here[number * each :][:each]) for number in range(servers)]


async def _wait(processes: Sequence[ServerProcess], seconds: float, keep_going: bool, recorder: Recorder) -> list[str]:
    """Wait for all servers; returns the arms that did not start, with `keep_going` and at least one that did."""
    starts = await asyncio.gather(*(process.wait(seconds) for process in processes), return_exceptions=True)
    failed: list[str] = []
    for process, start in zip(processes, starts, strict=True):
        if isinstance(start, BaseException):
            if not keep_going or not isinstance(start, BenchError) or len(failed) + 1 == len(processes):
                raise start
            failed.append(process.arm.name)
            say(f"left out: {start}")
            recorder.add("left out", arm=process.arm.name, error=str(start))
        else:
            recorder.add("started", arm=process.arm.name, seconds=round(start, 1), facts=_facts(process))
    return failed


FACTS = (
    "KDA prefill coalescing: ",
    "GPU KV cache size",
    "Maximum concurrency",
    "Asynchronous scheduling",
    "blocks",
)


def _facts(process: ServerProcess) -> list[str]:
    """Lines of a server's log that say what was built."""
    lines = [line for line in process.read_log().splitlines() if any(fact in line for fact in FACTS)]
    return [" ".join(line.split())[-300:] for line in lines[:12]]
