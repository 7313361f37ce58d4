# SPDX-License-Identifier: Apache-2.0
"""What `kda-prefill bench trace` prints for people."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vllm_kda_prefill.trace.report import Row, TraceReport
from vllm_kda_prefill.trace.state_counts import StateKind


def progress() -> Progress:
    """A progress bar with the time left, on stderr; silent where stderr is no terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def print_report(report: TraceReport) -> None:
    """The trace and its bounds, what each arm found, and what became of its states."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140
    trace, layout = report.trace, report.layout
    console.print(
        f"[bold]{trace.name}[/]: {len(trace.prompts):,} requests, {trace.tokens:,} prompt tokens, {report.load}; "
        f"DCP{layout.dcp}, {layout.mtp} draft tokens, {layout.mamba_groups} KDA groups, "
        f"blocks of {layout.attention_block}/{layout.mamba_block} tokens"
    )
    console.print(
        f"A cache of no limit that can resume at every {layout.mamba_block} tokens finds {report.unbounded_tokens:,} "
        f"of them, {report.of_prompt(report.unbounded_tokens):.4f}."
    )
    console.print(_found(report))
    console.print(_states(report))


def _found(report: TraceReport) -> Table:
    table = Table(title="Tokens", title_justify="left")
    for header in (
        "blocks",
        "arm",
        "cached",
        "of unbounded",
        "of foresight",
        "vs stock",
        "computed",
        "steps",
        "most at once",
    ):
        table.add_column(header, justify="left" if header == "arm" else "right")
    stock: dict[int, int] = {row.num_blocks: row.replay.cached_tokens for row in report.rows if row.arm == "stock"}
    for row in report.rows:
        cached = row.replay.cached_tokens
        table.add_row(
            f"{row.num_blocks:,}",
            row.arm,
            f"{cached:,}",
            _share(cached, report.unbounded_tokens),
            _share(cached, row.foresight_tokens),
            "-" if row.arm == "stock" else _share(cached, stock.get(row.num_blocks, 0)),
            f"{row.replay.computed_tokens:,}",
            f"{row.replay.steps:,}",
            f"{row.replay.most_running:,}",
            end_section=_is_last(report, row),
        )
    return table


def _states(report: TraceReport) -> Table:
    table = Table(title="States: by kind, tail / junction / span end / checkpoint position", title_justify="left")
    for header in ("blocks", "arm", "kept", "by kind", "held at the end", "evicted", "unused", "hits by kind"):
        table.add_column(header, justify="left" if header == "arm" else "right")
    for row in report.rows:
        states = row.replay.states
        table.add_row(
            f"{row.num_blocks:,}",
            row.arm,
            f"{states.kept.total():,}",
            _kinds(states.kept),
            f"{row.replay.held_states:,}",
            f"{states.evicted:,}",
            f"{states.evicted_unused:,}",
            _kinds(states.hits),
            end_section=_is_last(report, row),
        )
    return table


def _is_last(report: TraceReport, row: Row) -> bool:
    """Whether a row is the last of its size."""
    return [other for other in report.rows if other.num_blocks == row.num_blocks][-1] is row


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.3f}" if whole else "-"


def _kinds(counts: Mapping[StateKind, int]) -> str:
    return " / ".join(f"{counts.get(kind, 0):,}" for kind in StateKind)
