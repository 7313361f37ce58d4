# SPDX-License-Identifier: Apache-2.0
"""What the demo shows to people: its progress, and a row a request."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from vllm_kda_prefill.demo.conversation import Conversation


def progress() -> Progress:
    """A progress bar on stderr that leaves nothing behind; silent where stderr is no terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description:<36}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def print_demo(conversation: Conversation, plot: Path | None) -> None:
    """A row a turn, both arms side by side, and the verdict."""
    console = Console(highlight=False)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("\nrequest", no_wrap=True)
    for arm in ("stock", "coalesced"):
        table.add_column(f"{arm}\ncached", justify="right")
        table.add_column("\npasses", justify="right")
    table.add_column("states exported\nin its queries")
    table.add_column("answer\nright", justify="right")
    stock, coalesced = conversation.records["stock"], conversation.records["coalesced"]
    for before, after in zip(stock, coalesced, strict=True):
        table.add_row(
            after.turn.name,
            f"{before.cached:,}",
            str(before.passes),
            f"[bold]{after.cached:,}[/]" if after.cached > before.cached else f"{after.cached:,}",
            str(after.passes),
            " ".join(str(p) for span in after.spans for p in span.checkpoints),
            "[green]yes[/]" if conversation.is_equal(before, after) else "[red]NO[/]",
        )
    table.add_row()
    sums = [(sum(r.cached for r in records), sum(r.passes for r in records)) for records in (stock, coalesced)]
    table.add_row("sum", *(f"{value:,}" for pair in sums for value in pair), "", "")
    lengths = sorted({record.prompt for record in stock})
    console.print(
        f"{len(stock)} requests of {lengths[0]:,} to {lengths[-1]:,} tokens: what each finds in the prefix "
        "cache, and the passes of its prefill.\n"
    )
    console.print(table)
    verdict = "equals" if conversation.all_equal else "[red]differs from[/]"
    console.print(
        f"\nEvery answer {verdict} the same prompt computed without a cache "
        f"(largest relative difference {conversation.largest_difference:.1e}, fp64)."
    )
    if plot is not None:
        console.print(f"Timeline: {plot}")
