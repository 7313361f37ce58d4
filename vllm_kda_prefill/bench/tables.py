# SPDX-License-Identifier: Apache-2.0
"""Sections on a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table

from vllm_kda_prefill.bench.summary import Section


def print_sections(sections: Iterable[Section]) -> None:
    """A table each; as wide as it needs where the output is no terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    for section in sections:
        table = Table(title=section.title, box=box.SIMPLE, caption=section.note or None)
        for index, name in enumerate(section.header):
            table.add_column(name, justify="left" if index < 2 else "right")
        for row in section.rows:
            table.add_row(*row)
        console.print(table)
