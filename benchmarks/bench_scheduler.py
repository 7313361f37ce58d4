# SPDX-License-Identifier: Apache-2.0
"""What the gate costs the scheduler: `schedule()` with 256 requests decoding while 32 prompts arrive.

Usage: python -m benchmarks.bench_scheduler [--dcp 4 --mtp 3] [--json OUT]. No GPU. The stock and the coalescing
scheduler take turns step by step in one process. A round is the CPU time of all `schedule()` calls from the arrival
of 32 prompts until they are prefilled; rounds of decoding alone, of as many steps, go between.
"""

from __future__ import annotations

import gc
import json
import logging
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from vllm.v1.request import RequestStatus
from vllm_kda_prefill.planning import Arm, Engine, Layout

RUNNING = 256
ARRIVING = 32
WARM_UPS = 2
ARMS: tuple[Arm, Arm] = ("stock", "coalesced")


@dataclass
class Side:
    """One arm's scheduler and the time its `schedule()` calls took in the current round."""

    engine: Engine
    nanoseconds: int = 0
    steps: int = 0
    rounds: dict[str, list[float]] = field(default_factory=lambda: {"decode": [], "arrivals": []})

    def step(self) -> None:
        start = time.process_time_ns()
        output = self.engine.scheduler.schedule()
        self.nanoseconds += time.process_time_ns() - start
        self.steps += 1
        self.engine.answer(output)

    def close_round(self, kind: str) -> None:
        self.rounds[kind].append(self.nanoseconds / self.steps / 1e3)
        self.nanoseconds = self.steps = 0


def words(count: int, first: int) -> list[int]:
    return list(range(first, first + count))


def measure(layout: Layout, rounds: int, prompt: int) -> dict[str, Side]:
    """Microseconds a `schedule()` call of every round, by arm."""
    sides: dict[str, Side] = {arm: Side(Engine.build(layout, arm)) for arm in ARMS}
    for side in sides.values():
        for number in range(RUNNING):
            side.engine.add(f"running-{number}", words(600, 1000 * number), max_tokens=100_000)
        while any(request.num_output_tokens < 2 for request in side.engine.scheduler.requests.values()):
            side.step()
    steps = -(-ARRIVING * prompt // (layout.budget - 2 * RUNNING * (1 + layout.mtp))) + 4
    gc.disable()
    for number in range(WARM_UPS + rounds):
        gc.collect()
        run_round(list(sides.values())[:: 1 if number % 2 else -1], number, prompt, steps)
    gc.enable()
    for side in sides.values():
        side.rounds = {kind: seconds[WARM_UPS:] for kind, seconds in side.rounds.items()}
    return sides


def run_round(sides: list[Side], number: int, prompt: int, steps: int) -> None:
    """Prompts arrive and are prefilled, then as many steps of decoding; the sides take turns in the given order."""
    for side in sides:
        side.nanoseconds = side.steps = 0
        for arrival in range(ARRIVING):
            first = 10_000_000 + 40_000 * (ARRIVING * number + arrival)
            side.engine.add(f"arrival-{number}-{arrival}", words(prompt, first), max_tokens=4)
    for kind in ("arrivals", "decode"):
        for _ in range(steps):
            for side in sides:
                side.step()
        for side in sides:
            side.close_round(kind)
    for side in sides:
        left = [name for name in side.engine.scheduler.requests if name.startswith("arrival")]
        side.engine.scheduler.finish_requests(left, RequestStatus.FINISHED_ABORTED)


def main(
    dcp: Annotated[int, typer.Option(help="Decode context parallel ranks.")] = 1,
    mtp: Annotated[int, typer.Option(help="Draft tokens.")] = 0,
    prompt: Annotated[int, typer.Option(help="Tokens of an arriving prompt.")] = 2000,
    rounds: Annotated[int, typer.Option(help="Measured rounds, after two warm-ups.")] = 30,
    output: Annotated[Path | None, typer.Option("--json", help="Write every round here.")] = None,
) -> None:
    logging.disable(logging.WARNING)
    layout = Layout(dcp=dcp, mtp=mtp, num_blocks=30_000, max_seqs=RUNNING + ARRIVING)
    sides = measure(layout, rounds, prompt)
    title = f"µs a schedule(), {RUNNING} running, DCP{dcp}, MTP{mtp}, {rounds} rounds"
    table = Table("round", "stock", "coalesced", "ratio, median", "ratio, quartiles", title=title)
    for kind, label in (("arrivals", f"{ARRIVING} x {prompt:,} tokens arrive"), ("decode", "decoding only")):
        stock, ours = (sides[arm].rounds[kind] for arm in ARMS)
        ratios = sorted(b / a for a, b in zip(stock, ours, strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4)
        table.add_row(
            label,
            f"{statistics.median(stock):.0f}",
            f"{statistics.median(ours):.0f}",
            f"{middle:.3f}",
            f"{low:.3f} - {high:.3f}",
        )
    Console().print(table)
    if output is not None:
        output.write_text(json.dumps({arm: side.rounds for arm, side in sides.items()}))


if __name__ == "__main__":
    typer.run(main)
