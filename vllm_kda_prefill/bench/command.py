# SPDX-License-Identifier: Apache-2.0
"""`kda-prefill bench`: measure a server, compare arms, plan without a GPU, and render the report."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from vllm_kda_prefill.bench.plan import Plan

app = typer.Typer(
    help="Serving measurements: time to first token, branch reuse, decode, growth, and their report.",
    no_args_is_help=True,
)

Url = Annotated[str, typer.Argument(help="Root of the server, as http://host:8000.")]
Model = Annotated[str, typer.Option(help="Served name; default the server's first.")]
Output = Annotated[Path, typer.Option(help="File of JSON lines to write.")]
Seed = Annotated[int, typer.Option(help="Of every prompt; a server that has seen it needs another.")]
SampleCount = Annotated[int, typer.Option(help="Most samples of each kind.", min=1)]
Seconds = Annotated[float, typer.Option(help="Wall-clock time; what is short of it takes fewer samples.", min=1)]
Sizes = Annotated[str, typer.Option(help="Prompt tokens, with commas.")]
DEFAULT_SIZES = "8192,16384,32768"


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Positive numbers with commas between.

    Raises:
        typer.BadParameter: Something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{option} {text}: give positive numbers with commas, as 8192,16384")
    return tuple(int(part) for part in parts)


def finish(run: Coroutine[Any, Any, None], output: Path) -> None:
    """Run a measurement, print its tables last; exit status 1 and one line where it cannot be believed."""
    from vllm_kda_prefill.bench.errors import BenchError
    from vllm_kda_prefill.bench.records import read
    from vllm_kda_prefill.bench.summary import sections
    from vllm_kda_prefill.bench.tables import print_sections

    failure, before = None, written(output)
    try:
        asyncio.run(run)
    except BenchError as error:
        failure = error
    if written(output) != before:
        print_sections(sections(list(read(output))))
        print(f"samples: {output}")
    if failure is not None:
        print(f"error: {failure}", file=sys.stderr)
        raise typer.Exit(1)


def written(output: Path) -> int:
    """When a file was written, 0 where there is none: a run that failed early leaves an older one as it was."""
    return output.stat().st_mtime_ns if output.exists() else 0


def make_plan(**settings: Any) -> Plan:
    """A plan of the given settings; exit status 2 and one line for one that cannot be used."""
    from vllm_kda_prefill.bench.errors import BenchError
    from vllm_kda_prefill.bench.plan import Plan

    try:
        return Plan(**settings)
    except BenchError as error:
        raise typer.BadParameter(str(error)) from None


def measure_url(url: str, model: str, plan: Plan, output: Path, seconds: float, name: str) -> None:
    from vllm_kda_prefill.bench.runner import measure_url as measure

    finish(measure(url, model, plan, output, seconds, name), output)


Name = Annotated[str, typer.Option(help="What records call this server.")]


@app.command()
def prefill(
    url: Url,
    sizes: Sizes = DEFAULT_SIZES,
    samples: SampleCount = 10,
    seconds: Seconds = 600,
    seed: Seed = 1,
    model: Model = "",
    name: Name = "server",
    output: Output = Path("bench/prefill.jsonl"),
) -> None:
    """Cold prompts to a server that is there: warm-ups, probes, then samples with zero cached tokens each."""
    plan = make_plan(suites=("cold",), sizes=numbers(sizes, "--sizes"), samples=samples, seed=seed)
    measure_url(url, model, plan, output, seconds, name)


@app.command()
def branches(
    url: Url,
    points: Annotated[str, typer.Option(help="Where to leave the 8,192-token prompt, with commas.")] = (
        "7900,7400,6500,5000"
    ),
    samples: SampleCount = 20,
    seconds: Seconds = 300,
    seed: Seed = 1,
    model: Model = "",
    name: Name = "server",
    output: Output = Path("bench/branches.jsonl"),
) -> None:
    """Follow-ups that leave a cached 8,192-token prompt, to a server that is there."""
    plan = make_plan(
        suites=("branches",), sizes=(8192,), points=numbers(points, "--points"), samples=samples, seed=seed
    )
    measure_url(url, model, plan, output, seconds, name)


@app.command()
def decode(
    url: Url,
    contexts: Annotated[str, typer.Option(help="Prompt tokens, with commas.")] = "8192,32768",
    output_tokens: Annotated[int, typer.Option(help="Tokens a request decodes.", min=2)] = 256,
    samples: SampleCount = 6,
    seconds: Seconds = 300,
    seed: Seed = 1,
    model: Model = "",
    name: Name = "server",
    output: Output = Path("bench/decode.jsonl"),
) -> None:
    """Tokens and steps a second of one and of four requests at a time, to a server that is there."""
    plan = make_plan(
        suites=("decode",),
        sizes=(8192,),
        contexts=numbers(contexts, "--contexts"),
        output_tokens=output_tokens,
        samples=samples,
        seed=seed,
    )
    measure_url(url, model, plan, output, seconds, name)


Turns = Annotated[int, typer.Option(help="Requests of a trace.", min=1)]
Branching = Annotated[float, typer.Option(help="Probability that a turn renders its history again.", min=0, max=1)]


@app.command()
def conversations(
    url: Url,
    turns: Turns = 120,
    branching: Branching = 0.5,
    traces: Annotated[int, typer.Option(help="Most traces.", min=1)] = 3,
    seconds: Seconds = 600,
    seed: Seed = 1,
    model: Model = "",
    name: Name = "server",
    output: Output = Path("bench/conversations.jsonl"),
) -> None:
    """Conversations that extend and branch, to a server that is there (started with VLLM_SERVER_DEV_MODE=1)."""
    from vllm_kda_prefill.bench.workloads import Conversations

    workload = Conversations(turns=turns, branching=branching, seed=seed)
    plan = make_plan(suites=("conversations",), sizes=(8192,), workload=workload, traces=traces, seed=seed)
    measure_url(url, model, plan, output, seconds, name)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def ab(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="What vllm serve takes: a folder or a name.")],
    arms: Annotated[
        str, typer.Option(help="Of stock, ladder, replay, equal, equal-ends; NAME@BLOCKS for a cache of that size.")
    ] = "stock,ladder,equal",
    suites: Annotated[
        str, typer.Option(help="Of cold, branches, branches-room, decode, conversations, growth.")
    ] = "cold,branches",
    servers: Annotated[int, typer.Option(help="Servers of each arm; two show what differs by chance.", min=1)] = 1,
    processors: Annotated[int, typer.Option(help="Of each server alone; 0 leaves it to the system.", min=0)] = 0,
    page: Annotated[int, typer.Option(help="Tokens of a page in every arm; 0 leaves stock's.", min=0)] = 512,
    sizes: Sizes = DEFAULT_SIZES,
    growth_sizes: Annotated[str, typer.Option(help="Prompt tokens of suite growth.")] = (
        "2048,4096,8192,16384,32768,65536,131072"
    ),
    contexts: Annotated[str, typer.Option(help="Prompt tokens of suite decode.")] = "8192,32768",
    only: Annotated[list[str] | None, typer.Option(help="SUITE=ARM,ARM: arms of one suite; repeat for others.")] = None,
    samples: SampleCount = 20,
    turns: Turns = 120,
    branching: Branching = 0.5,
    traces: Annotated[int, typer.Option(help="Most traces of suite conversations.", min=1)] = 3,
    output_tokens: Annotated[int, typer.Option(help="Tokens a request decodes.", min=2)] = 256,
    seconds: Annotated[float, typer.Option(help="Wall-clock time of everything, starts included.", min=60)] = 1800,
    start_seconds: Annotated[float, typer.Option(help="Time the servers have to start.", min=1)] = 600,
    serve: Annotated[str, typer.Option(help="Command to serve with; default this Python's vllm serve.")] = "",
    keep_going: Annotated[
        bool, typer.Option(help="Leave out an arm that does not start and a suite that fails; exit status 1 then.")
    ] = False,
    seed: Seed = 1,
    output: Output = Path("bench/ab.jsonl"),
    logs: Annotated[Path, typer.Option(help="Folder for the servers' logs.")] = Path("bench/logs"),
) -> None:
    """Start each arm's server on this machine, let them take turns request by request, and compare.

    What follows -- is given to every vllm serve. All servers share the GPU: give each a part of its memory, as
    with --gpu-memory-utilization 0.2 and --kv-cache-memory-bytes.
    """
    from vllm_kda_prefill.bench.arms import arm_of, make_arm, servers_of
    from vllm_kda_prefill.bench.errors import BenchError
    from vllm_kda_prefill.bench.runner import measure_arms
    from vllm_kda_prefill.bench.server_process import SERVE
    from vllm_kda_prefill.bench.workloads import Conversations

    names = [name.strip() for name in arms.split(",")]
    if len(set(names)) != len(names):
        raise typer.BadParameter(f"--arms {arms}: name each arm once")
    try:
        command = tuple(shlex.split(serve)) or SERVE
    except ValueError as error:
        raise typer.BadParameter(f"--serve {serve}: {error}; quote it as a shell would") from None
    try:
        chosen = [server for name in names for server in servers_of(make_arm(name, page), servers)]
    except BenchError as error:
        raise typer.BadParameter(str(error)) from None
    for arm in chosen:
        if arm.equal_to and arm_of(arm.equal_to) not in names:
            raise typer.BadParameter(f"--arms {arms}: {arm.name} is held against {arm.equal_to}; name that one too")
    restricted = [read_only(text, names) for text in only or []]
    if len(dict(restricted)) < len(restricted):
        raise typer.BadParameter(f"--only {' --only '.join(only or [])}: name each suite once")
    plan = make_plan(
        suites=tuple(suite.strip() for suite in suites.split(",")),
        sizes=numbers(sizes, "--sizes"),
        growth_sizes=numbers(growth_sizes, "--growth-sizes"),
        contexts=numbers(contexts, "--contexts"),
        only=dict(restricted),
        samples=samples,
        output_tokens=output_tokens,
        workload=Conversations(turns=turns, branching=branching, seed=seed),
        traces=traces,
        seed=seed,
    )
    finish(
        measure_arms(
            chosen, model, context.args, plan, output, logs, seconds, start_seconds, keep_going, command, processors
        ),
        output,
    )


def read_only(text: str, arms: list[str]) -> tuple[str, tuple[str, ...]]:
    """A suite and the arms that take part in it."""
    suite, is_given, names = text.partition("=")
    chosen = tuple(names.split(","))
    if not is_given or not set(chosen) <= set(arms):
        raise typer.BadParameter(f"--only {text}: give SUITE=ARM,ARM with arms of --arms")
    return suite, chosen


@app.command()
def growth(
    lengths: Annotated[str, typer.Option(help="Prompt tokens, with commas.")] = (
        "2048,4096,8192,16384,32768,65536,131072"
    ),
    dcp: Annotated[int, typer.Option(help="Decode context parallel ranks: 1, 2, 4 or 8.")] = 1,
    mtp: Annotated[int, typer.Option(help="Draft tokens.", min=0, max=8)] = 3,
    page: Annotated[int, typer.Option(help="Tokens of a page.", min=16)] = 512,
    output: Output = Path("bench/growth.jsonl"),
) -> None:
    """Passes, retained states and bytes by prompt length, from vLLM's real scheduler; no GPU, no server."""
    from vllm_kda_prefill.cli import check_engine, quietly

    check_engine(dcp, mtp)
    sizes = numbers(lengths, "--lengths")

    def run() -> None:
        from vllm_kda_prefill.bench.planned_growth import measure

        measure(sizes, dcp, mtp, page, output)

    quietly(run, verbose=False)
    show(output)


@app.command()
def reuse(
    turns: Turns = 120,
    branching: Annotated[str, typer.Option(help="Probabilities that a turn branches, with commas.")] = "0,0.25,0.5,1",
    traces: Annotated[int, typer.Option(help="Traces of each kind.", min=1)] = 3,
    dcp: Annotated[int, typer.Option(help="Decode context parallel ranks: 1, 2, 4 or 8.")] = 1,
    mtp: Annotated[int, typer.Option(help="Draft tokens.", min=0, max=8)] = 3,
    groups: Annotated[int, typer.Option(help="KV cache groups of KDA layers.", min=1)] = 6,
    seed: Seed = 1,
    output: Output = Path("bench/reuse.jsonl"),
) -> None:
    """Cached tokens of conversations by KV cache size, from vLLM's real scheduler; no GPU, no server.

    Sizes: ample, that is all that any arm holds of a trace; a half, a quarter and an eighth of it.
    """
    from vllm_kda_prefill.cli import check_engine, quietly

    check_engine(dcp, mtp)
    try:
        parts = tuple(float(part) for part in branching.split(","))
    except ValueError:
        parts = (-1.0,)
    if not all(0 <= part <= 1 for part in parts):
        raise typer.BadParameter(f"--branching {branching}: give numbers from 0 to 1 with commas, as 0,0.5")

    def run() -> None:
        from vllm_kda_prefill.bench.planned_reuse import measure

        measure(turns, parts, traces, dcp, mtp, groups, seed, output)

    quietly(run, verbose=False)
    show(output)


def show(output: Path) -> None:
    from vllm_kda_prefill.bench.planned_summary import sections
    from vllm_kda_prefill.bench.records import read
    from vllm_kda_prefill.bench.tables import print_sections

    print_sections(sections(list(read(output))))
    print(f"samples: {output}")


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder with the .jsonl files of runs.")],
    output: Annotated[Path | None, typer.Option(help="Folder to write to; default the same.")] = None,
) -> None:
    """Render one self-contained HTML page, its plots as PNGs, and the tables in Markdown."""
    from vllm_kda_prefill.bench.errors import BenchError
    from vllm_kda_prefill.bench.report import render

    try:
        for path in render(folder, output or folder):
            print(path)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
