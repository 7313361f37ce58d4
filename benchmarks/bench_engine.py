# SPDX-License-Identifier: Apache-2.0
"""Decode steps and the first token of branches, gate off and on, in engines that take turns on one GPU.

Usage: python -m benchmarks.bench_engine OUT.jsonl [--seconds 240 --servers 2], or with --again for the tables of a
file that is there. Engines are small GLM-5.3-Flash shapes with MTP3 and CUDA graphs, as in tests/engine, which says
what the load format `seeded` needs.

An engine runs in one process, with no HTTP before it and, while another has its turn, nothing to do: what differs
between the arms here is what they do in a step. `schedule`, `update_from_output`, `execute_model` and `sample_tokens`
are the engine core's calls, whose time is host time; what they leave of a step is waiting for the GPU and output.

A host runs the same code faster and slower from second to second, by more than the arms differ. `sample_tokens` is
stock's own in both arms, so what it took in a sample says how fast the host was then: the last column compares parts
after each was divided by it.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tests.engine.arms import Arm, ArmProcess, generate
from tests.engine.glm import write_config
from tests.engine.run_arm import PARTS
from vllm_kda_prefill.bench.records import Recorder, read
from vllm_kda_prefill.bench.servers import in_turns
from vllm_kda_prefill.bench.stats import Spread, ratio_of_medians
from vllm_kda_prefill.bench.suites.branches import POINTS, SIZE
from vllm_kda_prefill.bench.suites.decode import CONCURRENCIES, CONTEXTS
from vllm_kda_prefill.bench.workloads import branch, prompt

ARMS = {"stock": False, "ladder": True}
STEPS = 60
SETTINGS = tuple((requests, context) for context in CONTEXTS for requests in CONCURRENCIES)
SAME = "sample_tokens"
PARTS_OF_A_STEP = ("step", "cpu", *(name for _, name in PARTS))


@dataclass(frozen=True)
class Engine:
    """A running engine and the arm it is of."""

    arm: str
    name: str
    process: ArmProcess

    def first_token(self, tokens: list[int]) -> tuple[float, int]:
        """Milliseconds to the prompt's first token, and how many of its tokens were cached."""
        (answer,) = self.process.step(generate(tokens, 1, 0))
        return answer["seconds"] * 1e3, answer["cached"]


def start(servers: int, capture: tuple[int, ...], model: Path, logs: Path) -> list[Engine]:
    """All engines, started at once; of each arm, as many as servers."""
    named = [(arm, f"{arm}#{number + 1}", gate) for number in range(servers) for arm, gate in ARMS.items()]

    engines: list[Engine] = []
    try:
        for arm, name, gate in named:
            settings = Arm(gate, eager=False, capture=capture, cache_gib=4, log_limit=0, label=name)
            engines.append(Engine(arm, name, ArmProcess(settings, model, logs)))
        with ThreadPoolExecutor(len(engines)) as pool:
            list(pool.map(lambda engine: engine.process.step({"summary": True}), engines))
    except BaseException:
        close(engines)
        raise
    return engines


def close(engines: Sequence[Engine]) -> None:
    """Let all engines end at once."""
    with ThreadPoolExecutor(max(len(engines), 1)) as pool:
        list(pool.map(lambda engine: engine.process.close(), engines))


def measure_branches(engine: Engine, number: int) -> Iterator[dict[str, Any]]:
    """A prompt of 8,192 tokens, then prompts that leave it."""
    base = prompt(SIZE, "base", number)
    for point in (0, *POINTS):
        tokens = branch(base, point, number) if point else base
        milliseconds, cached = engine.first_token(tokens)
        yield {"suite": "branches", "point": point, "ttft": milliseconds, "cached": cached}


def measure_decode(engine: Engine, steps: int) -> Iterator[dict[str, Any]]:
    """Every setting's steps; their prompts are the same each time, so that they are cached."""
    for requests, context in SETTINGS:
        prompts = [prompt(context, "decode", number) for number in range(requests)]
        answer = engine.process.step({"decode": prompts, "steps": steps})
        step = statistics.median(answer["times"])
        yield {"suite": "decode", "requests": requests, "context": context, "step": step, **answer}


def report(samples: list[dict[str, Any]]) -> None:
    """Tables of medians over samples, and of ratios between the arms."""

    def of(arm: str, key: str, by: str = "", **values: Any) -> list[list[float]]:
        found: dict[str, list[float]] = {}
        for sample in samples:
            if sample["arm"] == arm and all(sample.get(name) == value for name, value in values.items()):
                found.setdefault(sample["engine"], []).append(sample[key] / (sample[by] if by else 1.0))
        return list(found.values())

    def row(table: Table, label: str, key: str, by: str = "", **values: Any) -> None:
        stock, ladder = (of(arm, key, **values) for arm in ARMS)
        if stock and ladder:
            spreads = [Spread.of([value for one in arm for value in one]) for arm in (stock, ladder)]
            medians = [f"{s.median:.3f} ({s.low:.3f} to {s.high:.3f})" for s in spreads]
            ratios = [ratio_of_medians(stock, ladder)]
            if by:
                stock, ladder = (of(arm, key, by, **values) for arm in ARMS)
                ratios.append(ratio_of_medians(stock, ladder))
            table.add_row(label, str(spreads[0].count), *medians, *map(str, ratios))

    columns = ("samples an arm", *(f"{arm} ms" for arm in ARMS), "stock over ladder")
    table = Table("first token", *columns, title="One 8,192-token prompt and its branches")
    for point in (0, *POINTS):
        cached = {arm: sorted({int(n) for one in of(arm, "cached", point=point) for n in one}) for arm in ARMS}
        row(table, f"{f'leaves at {point:,}' if point else 'cold'}, cached {cached}", "ttft", point=point)
    Console(width=150).print(table)
    columns = (*columns, f"the same by {SAME}")
    table = Table("part of a step", *columns, title=f"Decode, medians of {STEPS} steps; parts are means of them")
    for requests, context in SETTINGS:
        for part in PARTS_OF_A_STEP:
            row(table, f"C{requests}, {context:,}: {part}", part, SAME, requests=requests, context=context)
    Console(width=150).print(table)


def main(
    output: Annotated[Path, typer.Argument(help="File of samples.")],
    seconds: Annotated[float, typer.Option(help="Time of the samples, after the engines' start.")] = 240,
    servers: Annotated[int, typer.Option("--servers", min=1, help="Engines of each arm.")] = 2,
    capture: Annotated[
        str, typer.Option(help="Batches with CUDA graphs, as 4,8,16,512; vLLM's own choice if empty.")
    ] = "",
    again: Annotated[bool, typer.Option("--again", help="Only print the tables of the file.")] = False,
) -> None:
    if again:
        report([record for record in read(output) if record["kind"] == "sample"])
        return
    sizes = tuple(int(size) for size in capture.split(",") if size)
    folder = Path(tempfile.mkdtemp(prefix="kda-bench-engine-"))
    engines: list[Engine] = []
    samples: list[dict[str, Any]] = []
    suites: tuple[Callable[[Engine, int], Iterator[dict[str, Any]]], ...] = (
        measure_branches,
        lambda engine, _: measure_decode(engine, STEPS),
    )
    try:
        engines = start(servers, sizes, write_config(folder / "glm"), output.with_suffix(".logs"))
        with Recorder(output, {"steps": STEPS, "servers": servers, "capture": sizes}) as recorder:
            for engine in engines:  # Warm-ups: kernels compile, decode prompts become cached.
                list(measure_branches(engine, -1))
                list(measure_decode(engine, 8))
            end, number = time.monotonic() + seconds, 0
            while time.monotonic() < end:
                for suite in suites:
                    for engine in in_turns(engines, number):
                        for sample in suite(engine, number):
                            samples.append({"arm": engine.arm, "engine": engine.name, **sample})
                            recorder.add("sample", round=number, **samples[-1])
                number += 1
    finally:
        close(engines)
        shutil.rmtree(folder)
    partial = sum(not sample.get("full", True) for sample in samples)
    if partial:
        print(f"{partial} decode samples hold a step without every request's token")
    report(samples)


if __name__ == "__main__":
    typer.run(main)
