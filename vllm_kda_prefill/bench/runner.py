"""Runs: against one server that is there, and against arms that are started, proven and ended here."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

from vllm_kda_prefill.bench import plan as plans
from vllm_kda_prefill.bench.arms import Arm
from vllm_kda_prefill.bench.budget import Budget
from vllm_kda_prefill.bench.client import Client
from vllm_kda_prefill.bench.lanes import Lane, check_after, check_before
from vllm_kda_prefill.bench.plan import Plan
from vllm_kda_prefill.bench.records import Recorder
from vllm_kda_prefill.bench.server import SERVE, SERVED_NAME, Server
from vllm_kda_prefill.bench.suites import warm_up

SHUTDOWN = 25.0
"""Seconds kept for ending the servers."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def measure_lanes(plan: Plan, lanes: Sequence[Lane], recorder: Recorder, budget: Budget) -> None:
    """Warm up and probe every lane, prove what each is, run the suites, and prove it again."""
    say("warm-ups and probes")
    for lane in lanes:
        if set(plan.suites) - {"conversations"}:
            await warm_up.warm_up(lane, plan.sizes, plan.seed)
        await warm_up.probe(lane, plan.sizes, plan.seed, recorder)
    await warm_up.probe_equal_retention(lanes, plan.sizes[0], plan.seed, recorder)
    before = [(lane, await check_before(lane, recorder), lane.cold_prefills) for lane in lanes]
    say(f"{', '.join(plan.suites)}: {budget.left:.0f} s left")
    await plans.run(plan, lanes, recorder, budget)
    for lane, reading, cold in before:
        await check_after(lane, reading, cold, recorder)


async def measure_url(
    url: str,
    model: str,
    plan: Plan,
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
        with Recorder(output, {"url": url, "model": client.model, "server_version": version, **plan.as_json()}) as to:
            await measure_lanes(plan, [Lane(name, client)], to, Budget(seconds))
    finally:
        await client.close()


async def measure_arms(
    arms: Sequence[Arm],
    model: str,
    arguments: list[str],
    plan: Plan,
    output: Path,
    logs: Path,
    seconds: float,
    start_seconds: float,
    serve: tuple[str, ...] = SERVE,
) -> None:
    """Start every arm's server at once, measure them in turns, and end them.

    Raises:
        BenchError: A server does not start, an arm is not what it says, or a sample cannot be believed.
    """
    budget = Budget(seconds - SHUTDOWN)
    servers: list[Server] = []
    lanes: list[Lane] = []
    try:
        for arm in arms:
            servers.append(Server(arm, model, arguments, logs, serve))
        configuration = {
            "model": model,
            "arms": {s.arm.name: {"environment": dict(s.arm.environment), "command": s.command} for s in servers},
            **plan.as_json(),
        }
        with Recorder(output, configuration) as recorder:
            say(f"starting {', '.join(arm.name for arm in arms)}")
            starts = await asyncio.gather(*(server.wait(start_seconds) for server in servers))
            lanes += [Lane(s.arm.name, Client(s.url, SERVED_NAME), s.arm, s) for s in servers]
            for lane, start in zip(lanes, starts, strict=True):
                recorder.add("started", arm=lane.name, seconds=round(start, 1), facts=_facts(lane))
            await measure_lanes(plan, lanes, recorder, budget)
    finally:
        for lane in lanes:
            await lane.client.close()
        await asyncio.gather(*(asyncio.to_thread(server.stop) for server in servers))


FACTS = ("KDA prefill coalescing: pages", "GPU KV cache size", "Maximum concurrency", "Asynchronous scheduling", "blocks")


def _facts(lane: Lane) -> list[str]:
    """Lines of a server's log that say what was built."""
    assert lane.server is not None
    lines = [line for line in lane.server.read_log().splitlines() if any(fact in line for fact in FACTS)]
    return [" ".join(line.split())[-300:] for line in lines[:12]]
