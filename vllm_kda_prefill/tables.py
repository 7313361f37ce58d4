# SPDX-License-Identifier: Apache-2.0
"""What the commands print for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from vllm_kda_prefill.conversation import Conversation
    from vllm_kda_prefill.plan_report import ArmReport, PlanReport


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


def print_plan(report: PlanReport) -> None:
    """The layout, both arms side by side, and what retention costs."""
    console = Console(highlight=False)
    hit = f", {report.cached:,} of them cached" if report.cached else ""
    console.print(f"[bold]{report.prompt:,} tokens[/]{hit}, policy {report.policy}")
    console.print(
        f"layout: recurrent page {report.physical:,}, lookup {report.lookup:,}, scheduler block "
        f"{report.scheduler:,} tokens"
    )
    table = Table()
    for header in ("", "query spans", "states exported inside", "states retained", "passes"):
        table.add_column(header, justify="right" if header == "passes" else "left")
    for name, arm in (("coalesced", report.coalesced), ("stock", report.stock)):
        table.add_row(
            name,
            "\n".join(_span_lines(arm)),
            "\n".join(_checkpoint_lines(arm)),
            _positions(arm.retained, report.unreachable),
            str(arm.passes),
        )
        table.add_section()
    console.print(table)
    if report.unreachable:
        console.print(f"[yellow]*[/] no lookup can return it in this layout: {_positions(report.unreachable)}")
    console.print(
        f"stock needs [bold]{report.equal_retention_passes}[/] passes to retain what coalescing retains in "
        f"[bold]{report.coalesced.passes}[/]; one state is {report.bytes_per_state / 1e6:,.1f} MB over all "
        "KDA layers and ranks"
    )


SHOWN_SPANS = 8


def _span_lines(arm: ArmReport) -> list[str]:
    lines = [f"[{span.start:,}, {span.end:,})".replace("[", r"\[") for span in arm.spans]
    return _shortened(lines, "...")


def _checkpoint_lines(arm: ArmReport) -> list[str]:
    return _shortened([_positions(span.checkpoints) or "-" for span in arm.spans], "")


def _shortened(lines: list[str], dots: str) -> list[str]:
    """The first and the last few lines of a long prompt's."""
    if len(lines) <= SHOWN_SPANS:
        return lines
    half = SHOWN_SPANS // 2
    return [*lines[:half], dots, *lines[-half:]]


def _positions(positions: Sequence[int], marked: Sequence[int] = ()) -> str:
    return " ".join(f"{p:,}" + ("[yellow]*[/]" if p in marked else "") for p in positions)


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
