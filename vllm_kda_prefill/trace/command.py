# SPDX-License-Identifier: Apache-2.0
"""`kda-prefill bench trace`: recorded prompts through vLLM's real scheduler, and made-up traces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_kda_prefill.bench.options import numbers
from vllm_kda_prefill.console import (
    MAX_PROMPT,
    AsJson,
    Dcp,
    Mtp,
    Verbose,
    check,
    check_block,
    check_engine,
    check_model,
    fail,
    quietly,
)
from vllm_kda_prefill.layout.command import read_memory
from vllm_kda_prefill.paths import ModelFolder, check_plot

if TYPE_CHECKING:
    from vllm_kda_prefill.planning import Layout
    from vllm_kda_prefill.trace.prompts import Trace
    from vllm_kda_prefill.trace.report import Load, TraceReport

POLICIES = ("ladder", "replay")
TP = 4


@dataclass(frozen=True)
class Cache:
    """What was said about the KV cache; `blocks` where `memory` is empty."""

    blocks: tuple[int, ...]
    memory: str
    model: Path | None
    tp: int
    dcp: int
    mtp: int
    block_size: int
    groups: int
    budget: int


def trace(
    files: Annotated[
        list[Path], typer.Argument(help="Recorded prompts, plain or .gz; with --make, the file to write.")
    ],
    blocks: Annotated[
        str, typer.Option(help="Blocks of the KV cache, with commas: a replay for each.")
    ] = "60000,15000,4000",
    memory: Annotated[
        str,
        typer.Option(help="In place of --blocks: KV cache memory of one rank, as 24GiB,96GiB; --model is for this."),
    ] = "",
    model: ModelFolder = None,
    tp: Annotated[int, typer.Option(help=f"With --memory: tensor parallel ranks; 0 is {TP}, or --dcp.", min=0)] = 0,
    dcp: Dcp = 1,
    mtp: Mtp = 0,
    block_size: Annotated[
        int, typer.Option(help="Tokens of an attention block on a rank, and of a Mamba block.")
    ] = 512,
    groups: Annotated[int, typer.Option(help="KV cache groups of KDA layers; --memory has its own.", min=1)] = 6,
    budget: Annotated[int, typer.Option(help="Tokens of one step.", min=1)] = 8192,
    policy: Annotated[str, typer.Option(help="Arms beside stock: ladder, replay, or both.")] = "ladder,replay",
    requests: Annotated[int | None, typer.Option(help="Only the first so many; with --make, how many.", min=1)] = None,
    longest: Annotated[int, typer.Option(help="Cut prompts at so many tokens.", min=1, max=MAX_PROMPT)] = 131_072,
    concurrent: Annotated[int, typer.Option(help="Requests at a time.", min=1, max=1024)] = 1,
    arrivals: Annotated[
        float | None, typer.Option(help="Let requests come at their recorded times, so many times as fast.")
    ] = None,
    prefill_rate: Annotated[float, typer.Option(help="With --arrivals: tokens a second that are prefilled.")] = 20_000,
    plot: Annotated[Path | None, typer.Option(help="Draw cached shares over blocks into this PNG, SVG or PDF.")] = None,
    make: Annotated[str, typer.Option(help="Write a made-up trace of this KIND to FILE, and replay nothing.")] = "",
    seed: Annotated[int, typer.Option(help="With --make: of all that is random.")] = 1,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Replay recorded prompts through vLLM's real scheduler and KV cache manager; no GPU, no server.

    Reads Mooncake's lines (timestamp, input_length, output_length, hash_ids of 512 tokens) and agent sessions of one
    JSON file each. Prints what stock and each policy find in the prefix cache, beside what a cache without limit and
    one with foresight find. Kinds for --make: agents, mix, uniform, scan, repeat, rerender, rerender-long.
    """
    if make:
        _make(make, files, requests, seed)
        return
    check_engine(dcp, mtp)
    _check_numbers(budget, mtp, block_size, arrivals, prefill_rate)
    check("--concurrent", concurrent, concurrent == 1 or arrivals is None, "leave it out, or leave out --arrivals")
    check("--tp", tp, tp % dcp == 0, f"give a multiple of --dcp, {dcp}")
    if plot is not None:
        check_plot(plot)
    arms = tuple(dict.fromkeys(("stock", *(name.strip() for name in policy.split(",")))))
    check("--policy", policy, set(arms) <= {"stock", *POLICIES}, "give ladder, replay, or both with a comma")
    cache = Cache(numbers(blocks, "--blocks"), memory, model, tp or max(TP, dcp), dcp, mtp, block_size, groups, budget)
    if memory:
        _check_memory(cache)
    report = _run(files, cache, arms, requests, longest, (concurrent, arrivals, prefill_rate), verbose)
    if plot is not None:
        from vllm_kda_prefill.trace.plot import draw

        draw(report, plot)
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        from vllm_kda_prefill.trace.tables import print_report

        print_report(report)


def _run(
    files: Sequence[Path],
    cache: Cache,
    arms: Sequence[str],
    requests: int | None,
    longest: int,
    load: tuple[int, float | None, float],
    verbose: bool,
) -> TraceReport:
    from vllm_kda_prefill.trace.errors import TraceError
    from vllm_kda_prefill.trace.reader import read_traces

    try:
        recorded = read_traces(files).first(requests, longest)
        return quietly(lambda: _replay(recorded, cache, arms, load), verbose, spinner=False, given={"--tp": cache.tp})
    except TraceError as error:
        fail(str(error))


def _replay(recorded: Trace, cache: Cache, arms: Sequence[str], how: tuple[int, float | None, float]) -> TraceReport:
    from vllm_kda_prefill.trace.report import Load, make_report
    from vllm_kda_prefill.trace.tables import progress

    load = Load(*how)
    layout, sizes = _layout(cache, load)
    with progress() as bar:
        task = bar.add_task("starting", total=len(recorded.prompts) * len(arms) * len(sizes))

        def advance(doing: str, requests: int) -> None:
            bar.update(task, description=doing, advance=requests)

        return make_report(recorded, layout, sizes, arms, load, advance)


def _layout(cache: Cache, load: Load) -> tuple[Layout, Sequence[int]]:
    """The KV cache but for its size, and its sizes."""
    from vllm_kda_prefill.planning import Layout

    groups, open_pool, sizes = cache.groups, 0, list(cache.blocks)
    if cache.memory:
        from vllm_kda_prefill.trace.sizes import of_memory

        memories = [read_memory(part) for part in cache.memory.split(",")]
        held = of_memory(memories, cache.model, cache.tp, cache.dcp, cache.mtp, cache.block_size)
        groups, open_pool, sizes = held.mamba_groups, held.open_pool, held.num_blocks
    layout = Layout(
        attention_block=cache.block_size,
        mamba_block=cache.block_size,
        dcp=cache.dcp,
        mtp=cache.mtp,
        budget=cache.budget,
        mamba_groups=groups,
        open_pool=open_pool,
        max_seqs=max(64, load.concurrent),
    )
    return layout, sizes


def _make(kind: str, files: Sequence[Path], requests: int | None, seed: int) -> None:
    from vllm_kda_prefill.trace.errors import TraceError
    from vllm_kda_prefill.trace.makers import KINDS, write_trace

    check("--make", kind, kind in KINDS, f"give one of {', '.join(KINDS)}")
    check("--make", kind, len(files) == 1, f"name one file to write, not {len(files)}")
    try:
        write_trace(files[0], kind, requests, seed)
    except TraceError as error:
        fail(str(error))


def _check_numbers(budget: int, mtp: int, block_size: int, arrivals: float | None, prefill_rate: float) -> None:

    check("--budget", budget, budget > mtp, f"give at least {mtp + 1} tokens, one more than --mtp")
    check_block("--block-size", block_size)
    check("--arrivals", arrivals, arrivals is None or 0 < arrivals < float("inf"), "give a number above 0")
    check("--prefill-rate", prefill_rate, 0 < prefill_rate < float("inf"), "give tokens a second, above 0")


def _check_memory(cache: Cache) -> None:

    for part in cache.memory.split(","):
        check("--memory", part, read_memory(part) > 0, "give more than nothing")
    check_model(cache.model, cache.mtp)
