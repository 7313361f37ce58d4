# SPDX-License-Identifier: Apache-2.0
"""Arms that take turns, and the proof that each does what its name says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from vllm_kda_prefill.bench import metrics
from vllm_kda_prefill.bench.arms import Arm
from vllm_kda_prefill.bench.client import Answer, Client
from vllm_kda_prefill.bench.errors import BenchError
from vllm_kda_prefill.bench.metrics import Metrics
from vllm_kda_prefill.bench.records import Recorder
from vllm_kda_prefill.bench.server_process import ServerProcess

T = TypeVar("T")
STARTED = re.compile(r"KDA prefill coalescing: \w+ of \d+ tokens")
PLANNED = "KDA prefill plan: request"
"""What the scheduler logs at its start, and of a plan."""


@dataclass
class Server:
    """One server as the suites see it.

    Attributes:
        name: The arm.
        client: Where requests go.
        arm: How it was started, None for a server that was there before.
        process: What was started here, likewise.
        cold_prefills: Requests so far that found nothing in the cache.
    """

    name: str
    client: Client
    arm: Arm | None = None
    process: ServerProcess | None = None
    cold_prefills: int = field(default=0, init=False)

    @property
    def is_up(self) -> bool:
        """Whether its process, where it was started here, has not ended."""
        return self.process is None or self.process.is_running

    async def cold(self, tokens: list[int], max_tokens: int = 1) -> Answer:
        """Send a prompt that nobody has sent before.

        Raises:
            BenchError: The server found some of it in its cache all the same.
        """
        answer = await self.client.complete(tokens, max_tokens)
        if answer.cached:
            raise BenchError(
                f"arm {self.name}: a cold prompt of {answer.prompt} tokens found {answer.cached} in the prefix cache; "
                "give another --seed, or restart the server"
            )
        self.cold_prefills += 1
        return answer


def in_turns(servers: Sequence[T], number: int) -> list[T]:
    """The servers in the order of one round: each goes first equally often, and after each other one."""
    start = number % len(servers)
    turned = [*servers[start:], *servers[:start]]
    return turned if (number // len(servers)) % 2 == 0 else turned[::-1]


def timing(answer: Answer) -> dict[str, float | int]:
    """What records keep of an answer."""
    return {
        "prompt": answer.prompt,
        "cached": answer.cached,
        "output": answer.output,
        "ttft": round(answer.ttft, 6),
        "seconds": round(answer.seconds, 6),
    }


async def check_before(server: Server, recorder: Recorder) -> Metrics:
    """Prove, after warm-ups and probes, that the gate is on or off as the arm says.

    Raises:
        BenchError: It is not.
    """
    reading = await server.client.metrics()
    counted = {"spans": reading[metrics.SPANS], "exported": reading[metrics.EXPORTED]}
    logged = server.process.read_log() if server.process else ""
    plans = [line[line.index(PLANNED) :] for line in logged.splitlines() if PLANNED in line]
    recorder.add("activation", when="before", arm=server.name, **counted, plans=plans[:LOGGED])
    if server.arm is None:
        return reading
    if server.arm.coalesces:
        missing = [name for name in ("spans", "exported") if not counted[name]]
        if missing or not plans or not STARTED.search(logged):
            raise BenchError(
                f"arm {server.name}: the gate is not active (spans {counted['spans']:.0f}, states exported "
                f"{counted['exported']:.0f}, {len(plans)} plans in the log); install this fork where vllm serve runs"
            )
    elif reading.coalesces or plans or STARTED.search(logged):
        raise BenchError(
            f"arm {server.name}: the gate is active, and must not be; see {server.process and server.process.log}"
        )
    return reading


async def check_after(server: Server, before: Metrics, cold_before: int, recorder: Recorder) -> None:
    """Prove that the gate was at work while it was timed: a span for each cold prompt at least.

    Raises:
        BenchError: It was not.
    """
    moved = (await server.client.metrics()).since(before)
    cold = server.cold_prefills - cold_before
    recorder.add("activation", when="after", arm=server.name, cold_prompts=cold, counters=moved)
    if server.arm is None:
        return
    spans = moved.get(metrics.SPANS, 0)
    if server.arm.coalesces and spans < max(cold, 1):
        raise BenchError(
            f"arm {server.name}: {spans:.0f} spans were coalesced for {cold} cold prompts that were timed; "
            f"fallbacks {moved.get(metrics.FALLBACKS, 0):.0f}: see {metrics.FALLBACKS} for the reasons"
        )
    if not server.arm.coalesces and metrics.SPANS in moved:
        raise BenchError(f"arm {server.name}: the gate became active while it was timed")


LOGGED = 40
"""Plan lines that a record keeps."""
