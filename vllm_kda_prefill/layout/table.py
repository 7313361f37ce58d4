# SPDX-License-Identifier: Apache-2.0
"""What `kda-prefill layout` prints for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from vllm_kda_prefill.layout.report import GLM, LENGTHS, CacheReport, ladder

if TYPE_CHECKING:
    from vllm.v1.core.cache_capacity import CacheGroup, CacheLayout

MIB = 2**20
NAMES = {"mamba": "Mamba"}
"""Kind of a group -> what the table calls it, where that differs."""


def print_layouts(report: CacheReport) -> None:
    """Every layout in a column: blocks and groups, padding, capacity, and what retained states cost."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    shape = report.shape
    console.print(
        f"[bold]{shape.name}[/]: TP{shape.tp}, DCP{shape.dcp}, {shape.mtp} draft tokens, KV cache "
        f"{shape.kv_cache_dtype}, {report.memory / 2**30:,.2f} GiB a rank"
    )
    table = Table()
    table.add_column("per rank, unless it says tokens", no_wrap=True)
    for name in report.layouts:
        split = "" if name == "stock" else "split "
        table.add_column(f"{split}{name}" + ("\n(auto)" if name == report.auto else ""), justify="right")
    for section in (_blocks(), _capacity(report), _states()):
        for title, cell in section.items():
            table.add_row(title, *(cell(layout) for layout in report.layouts.values()))
        table.add_section()
    console.print(table)
    console.print(f"Tokens of cache as vLLM counts them, in requests of {report.max_model_len:,} tokens.")
    if shape.architecture not in GLM:
        console.print("The split settings are for GLM-5.3-Flash; this model is served as in stock's column.")


Row = Callable[["CacheLayout"], str]


def _blocks() -> dict[str, Row]:
    return {
        "attention block, tokens": lambda layout: f"{layout.sizes.attention:,}",
        "Mamba block, tokens": lambda layout: f"{layout.sizes.mamba:,}",
        "lookup, scheduler block, tokens": lambda layout: (
            f"{layout.grid.hit_alignment:,}, {layout.grid.scheduler_block:,}"
        ),
        "one block of the pool": lambda layout: _mib(layout.block_bytes),
        "groups, layers x tokens: used": _groups,
        "padding": _padding,
    }


def _capacity(report: CacheReport) -> dict[str, Row]:
    rows: dict[str, Row] = {
        "blocks": lambda layout: f"{layout.blocks(report.memory):,}",
        "bytes a token": lambda layout: f"{layout.bytes_per_token:,.0f}",
        "tokens of cache": lambda layout: f"[bold]{report.tokens_of_cache(layout):,}[/]",
    }
    for length in LENGTHS:
        rows[f"requests of {length:,} tokens"] = _requests(report, length)
    return rows


def _requests(report: CacheReport, length: int) -> Row:
    return lambda layout: f"{layout.requests(report.memory, length):,}"


def _states() -> dict[str, Row]:
    rows: dict[str, Row] = {
        "a retained state: blocks, bytes": lambda layout: f"{len(layout.of_kind('mamba'))}, {_mib(layout.state_bytes)}",
        "of this, state": lambda layout: _mib(layout.state_content_bytes),
    }
    for length in LENGTHS:
        rows[f"ladder of {length:,} tokens"] = _ladder(length)
    rows[f"states of {LENGTHS[0]:,} tokens"] = lambda layout: " ".join(
        f"{position:,}" for position in ladder(layout, LENGTHS[0])
    )
    return rows


def _ladder(length: int) -> Row:
    def cell(layout: CacheLayout) -> str:
        count = len(ladder(layout, length))
        return f"{count} x state, {_mib(count * layout.state_bytes)}"

    return cell


def _groups(layout: CacheLayout) -> str:
    alike = Counter((group.kind, group.layers, group.tokens, group.content_bytes) for group in layout.groups)
    return "\n".join(
        f"{count} {NAMES.get(kind, kind)} {layers} x {tokens:,}: {_mib(used)}"
        for (kind, layers, tokens, used), count in alike.items()
    )


def _padding(layout: CacheLayout) -> str:
    kinds: dict[str, list[CacheGroup]] = {}
    for group in layout.groups:
        kinds.setdefault(group.kind, []).append(group)
    shares = {
        kind: sum(map(layout.waste, groups)) / (layout.block_bytes * len(groups)) for kind, groups in kinds.items()
    }
    return "\n".join(f"{NAMES.get(kind, kind)} {share:.1%}" for kind, share in shares.items())


def _mib(size: int) -> str:
    return f"{size / MIB:,.2f} MiB"
