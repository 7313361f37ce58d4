"""Arms that take turns, and the proof that each does what its name says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from vllm_kda_prefill.bench import metrics
from vllm_kda_prefill.bench.arms import Arm
from vllm_kda_prefill.bench.client import Answer, Client
from vllm_kda_prefill.bench.errors import BenchError
from vllm_kda_prefill.bench.metrics import Metrics
from vllm_kda_prefill.bench.records import Recorder
from vllm_kda_prefill.bench.server import Server

T = TypeVar("T")
STARTED, PLANNED = "KDA prefill coalescing: pages of", "KDA prefill plan: request"


@dataclass
class Lane:
    """One server as the suites see it.

    Attributes:
        name: The arm.
        client: Where requests go.
        arm: How it was started, None for a server that was there before.
        server: Its process, likewise.
        cold_prefills: Requests so far that found nothing in the cache.
    """

    name: str
    client: Client
    arm: Arm | None = None
    server: Server | None = None
    cold_prefills: int = field(default=0, init=False)

    @property
    def is_up(self) -> bool:
        """Whether its server, where it was started here, has not ended."""
        return self.server is None or self.server.is_running

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


def in_turns(lanes: Sequence[T], number: int) -> list[T]:
    """The lanes in the order of one round: each goes first equally often, and after each other one."""
    start = number % len(lanes)
    turned = [*lanes[start:], *lanes[:start]]
    return turned if (number // len(lanes)) % 2 == 0 else turned[::-1]


def timing(answer: Answer) -> dict[str, float | int]:
    """What records keep of an answer."""
    return {
        "prompt": answer.prompt,
        "cached": answer.cached,
        "output": answer.output,
        "ttft": round(answer.ttft, 6),
        "seconds": round(answer.seconds, 6),
    }


async def check_before(lane: Lane, recorder: Recorder) -> Metrics:
    """Prove, after warm-ups and probes, that the gate is on or off as the arm says.

    Raises:
        BenchError: It is not.
    """
    reading = await lane.client.metrics()
    counted = {"spans": reading[metrics.SPANS], "exported": reading[metrics.EXPORTED]}
    logged = lane.server.read_log() if lane.server else ""
    plans = [line[line.index(PLANNED) :] for line in logged.splitlines() if PLANNED in line]
    recorder.add("activation", when="before", arm=lane.name, **counted, plans=plans[:LOGGED])
    if lane.arm is None:
        return reading
    if lane.arm.coalesces:
        missing = [name for name in ("spans", "exported") if not counted[name]]
        if missing or not plans or STARTED not in logged:
            raise BenchError(
                f"arm {lane.name}: the gate is not active (spans {counted['spans']:.0f}, states exported "
                f"{counted['exported']:.0f}, {len(plans)} plans in the log); install this fork where vllm serve runs"
            )
    elif reading.coalesces or plans or STARTED in logged:
        raise BenchError(f"arm {lane.name}: the gate is active, and must not be; see {lane.server and lane.server.log}")
    return reading


async def check_after(lane: Lane, before: Metrics, cold_before: int, recorder: Recorder) -> None:
    """Prove that the gate was at work while it was timed: a span for each cold prompt at least.

    Raises:
        BenchError: It was not.
    """
    moved = (await lane.client.metrics()).since(before)
    cold = lane.cold_prefills - cold_before
    recorder.add("activation", when="after", arm=lane.name, cold_prompts=cold, counters=moved)
    if lane.arm is None:
        return
    spans = moved.get(metrics.SPANS, 0)
    if lane.arm.coalesces and spans < max(cold, 1):
        raise BenchError(
            f"arm {lane.name}: {spans:.0f} spans were coalesced for {cold} cold prompts that were timed; "
            f"fallbacks {moved.get(metrics.FALLBACKS, 0):.0f}: see {metrics.FALLBACKS} for the reasons"
        )
    if not lane.arm.coalesces and metrics.SPANS in moved:
        raise BenchError(f"arm {lane.name}: the gate became active while it was timed")


LOGGED = 40
"""Plan lines that a record keeps."""
