# SPDX-License-Identifier: Apache-2.0
"""`kda-prefill bench growth` and `reuse`: ask vLLM's real scheduler, without a GPU or a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_kda_prefill.bench.options import Output, Seed, Turns, numbers
from vllm_kda_prefill.console import MAX_PROMPT, check, check_block, check_engine, quietly
from vllm_kda_prefill.paths import check_output


def growth(
    lengths: Annotated[str, typer.Option(help="Prompt tokens, with commas.")] = (
        "2048,4096,8192,16384,32768,65536,131072"
    ),
    dcp: Annotated[int, typer.Option(help="Decode context parallel ranks: 1, 2, 4 or 8.")] = 1,
    mtp: Annotated[int, typer.Option(help="Draft tokens.", min=0, max=8)] = 3,
    block: Annotated[int, typer.Option(help="Tokens of a block.")] = 512,
    output: Output = Path("bench/growth.jsonl"),
) -> None:
    """Passes, retained states and bytes by prompt length, from vLLM's real scheduler; no GPU, no server."""
    check_engine(dcp, mtp)
    check_block("--block", block)
    check_output(output)
    sizes = numbers(lengths, "--lengths")
    check("--lengths", lengths, max(sizes) <= MAX_PROMPT, f"give at most {MAX_PROMPT} tokens")

    def run() -> None:
        from vllm_kda_prefill.bench.scheduler.growth import measure

        measure(sizes, dcp, mtp, block, output)

    quietly(run, verbose=False)
    show(output)


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
    check_engine(dcp, mtp)
    check_output(output)
    try:
        parts = tuple(float(part) for part in branching.split(","))
    except ValueError:
        parts = (-1.0,)
    if not all(0 <= part <= 1 for part in parts):
        raise typer.BadParameter(f"--branching {branching}: give numbers from 0 to 1 with commas, as 0,0.5")

    def run() -> None:
        from vllm_kda_prefill.bench.scheduler.reuse import measure

        measure(turns, parts, traces, dcp, mtp, groups, seed, output)

    quietly(run, verbose=False)
    show(output)


def show(output: Path) -> None:
    from vllm_kda_prefill.bench.records import read
    from vllm_kda_prefill.bench.scheduler.sections import sections
    from vllm_kda_prefill.bench.tables import print_sections

    print_sections(sections(list(read(output))))
    print(f"samples: {output}")
