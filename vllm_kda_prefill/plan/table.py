# SPDX-License-Identifier: Apache-2.0
"""What the plan of a prompt looks like to people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from vllm_kda_prefill.plan.report import ArmReport, PlanReport


def print_plan(report: PlanReport) -> None:
    """The layout, both arms side by side, and what retention costs."""
    console = Console(highlight=False)
    hit = f", {report.cached:,} of them cached" if report.cached else ""
    console.print(f"[bold]{report.prompt:,} tokens[/]{hit}, policy {report.policy}")
    console.print(
        f"layout: Mamba block {report.mamba_block:,}, lookup {report.lookup:,}, scheduler block "
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
