# SPDX-License-Identifier: Apache-2.0
"""What the commands of `kda-prefill bench` share: their options, and the end of a run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_kda_prefill.console import check

if TYPE_CHECKING:
    from vllm_kda_prefill.bench.settings import RunSettings

Url = Annotated[str, typer.Argument(help="Root of the server, as http://host:8000.")]
Model = Annotated[str, typer.Option(help="Served name; default the server's first.")]
Output = Annotated[Path, typer.Option(help="File of JSON lines to write; missing folders are made.")]
Seed = Annotated[int, typer.Option(help="Of every prompt; a server that has seen it needs another.")]
SampleCount = Annotated[int, typer.Option(help="Most samples of each kind.", min=1)]
Seconds = Annotated[float, typer.Option(help="Wall-clock time; what is short of it takes fewer samples.", min=1)]
Sizes = Annotated[str, typer.Option(help="Prompt tokens, with commas.")]
Name = Annotated[str, typer.Option(help="What records call this server.")]
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


def check_url(url: str) -> None:
    """End the command unless a server's root is one that can be asked."""
    import httpx

    try:
        found: httpx.URL | None = httpx.URL(url)
    except httpx.InvalidURL:
        found = None
    is_good = found is not None and found.scheme in ("http", "https") and bool(found.host)
    check("URL", repr(url), is_good, "give the root of a server, as http://host:8000")


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


def make_settings(**chosen: Any) -> RunSettings:
    """The settings of a run; exit status 2 and one line for one that cannot be used."""
    from vllm_kda_prefill.bench.errors import BenchError
    from vllm_kda_prefill.bench.settings import RunSettings

    try:
        return RunSettings(**chosen)
    except BenchError as error:
        raise typer.BadParameter(str(error)) from None


Turns = Annotated[int, typer.Option(help="Requests of a trace.", min=1)]
Branching = Annotated[float, typer.Option(help="Probability that a turn renders its history again.", min=0, max=1)]
