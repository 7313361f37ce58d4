# SPDX-License-Identifier: Apache-2.0
"""`kda-prefill bench ab`: start the servers of several arms and compare them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from vllm_kda_prefill.bench.options import (
    DEFAULT_SIZES,
    Branching,
    Output,
    SampleCount,
    Seed,
    Sizes,
    Turns,
    finish,
    make_settings,
    numbers,
)
from vllm_kda_prefill.console import check_block
from vllm_kda_prefill.paths import check_output


def ab(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="What vllm serve takes: a folder or a name.")],
    arms: Annotated[
        str, typer.Option(help="Of stock, ladder, replay, equal; NAME@BLOCKS for a cache of that size.")
    ] = "stock,ladder,equal",
    suites: Annotated[
        str, typer.Option(help="Of cold, branches, branches-room, decode, conversations, growth.")
    ] = "cold,branches",
    servers: Annotated[int, typer.Option(help="Servers of each arm; two show what differs by chance.", min=1)] = 1,
    processors: Annotated[int, typer.Option(help="Of each server alone; 0 leaves it to the system.", min=0)] = 0,
    block: Annotated[int, typer.Option(help="Tokens of a block in every arm; 0 leaves stock's.", min=0)] = 512,
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
    logs: Annotated[Path, typer.Option(help="Folder for the servers' logs; made if missing.")] = Path("bench/logs"),
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

    if block:
        check_block("--block", block)
    check_output(output)
    check_output(logs, "--logs", is_folder=True)
    names = [name.strip() for name in arms.split(",")]
    if len(set(names)) != len(names):
        raise typer.BadParameter(f"--arms {arms}: name each arm once")
    try:
        command = tuple(shlex.split(serve)) or SERVE
    except ValueError as error:
        raise typer.BadParameter(f"--serve {serve}: {error}; quote it as a shell would") from None
    try:
        chosen = [server for name in names for server in servers_of(make_arm(name, block), servers)]
    except BenchError as error:
        raise typer.BadParameter(str(error)) from None
    for arm in chosen:
        if arm.equal_to and arm_of(arm.equal_to) not in names:
            raise typer.BadParameter(f"--arms {arms}: {arm.name} is held against {arm.equal_to}; name that one too")
    restricted = [read_only(text, names) for text in only or []]
    if len(dict(restricted)) < len(restricted):
        raise typer.BadParameter(f"--only {' --only '.join(only or [])}: name each suite once")
    settings = make_settings(
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
            chosen, model, context.args, settings, output, logs, seconds, start_seconds, keep_going, command, processors
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
