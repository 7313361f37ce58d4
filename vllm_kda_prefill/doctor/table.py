# SPDX-License-Identifier: Apache-2.0
"""What `kda-prefill doctor` prints for people."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_kda_prefill.doctor.findings import Colour, Finding, exit_status


def print_findings(findings: list[Finding]) -> None:
    """A line for each finding, its colour as a word as well, and hints below."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for column in ("colour", "check"):
        table.add_column(column, no_wrap=True)
    table.add_column("message", overflow="fold")
    for finding in findings:
        # Text, not markup: a variable's value may look like markup.
        table.add_row(Text(finding.colour, style=f"bold {finding.colour}"), finding.check, Text(finding.message))
        if finding.hint:
            table.add_row("", "", Text(f"-> {finding.hint}"))
    console.print(table)
    counts = Counter(finding.colour for finding in findings)
    verdict = "would not" if exit_status(findings) else "can"
    console.print(
        ", ".join(f"{counts[colour]} {colour}" for colour in Colour) + f": a server {verdict} start with the gate on"
    )
