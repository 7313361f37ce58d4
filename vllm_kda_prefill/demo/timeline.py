# SPDX-License-Identifier: Apache-2.0
"""The demo's conversation as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

if TYPE_CHECKING:
    from vllm_kda_prefill.demo.conversation import Conversation, TurnRecord
    from vllm_kda_prefill.planning import Arm

HIT, PASS, STATE, INK = "#b9d3ea", "#e8833a", "#1d3557", "#333333"
BAR = 0.52


def draw(conversation: Conversation, path: Path) -> None:
    """Draw both arms side by side, a row a request, into a PNG, SVG or PDF file."""
    names = [f"{turn.name}" for turn in conversation.turns]
    longest = max(record.prompt for records in conversation.records.values() for record in records)
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.9), sharey=True)
    arms: tuple[Arm, Arm] = ("stock", "coalesced")
    titles = {"stock": "stock vLLM", "coalesced": "coalesced"}
    for axis, arm in zip(axes, arms, strict=True):
        records = conversation.records[arm]
        for row, record in enumerate(records):
            _draw_turn(axis, row, record)
        passes, hits = sum(r.passes for r in records), sum(r.cached for r in records)
        axis.set_title(
            f"{titles[arm]}: {passes} passes, {hits:,} tokens from the cache", fontsize=11, color=INK, pad=10
        )
        axis.set_xlim(0, longest * 1.09)
        axis.set_ylim(len(records) - 0.45, -0.6)
        axis.set_xticks(range(0, longest + 1, 2048))
        axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
        axis.set_yticks(range(len(names)), names, fontsize=9.5)
        axis.set_xlabel("tokens of the prompt", fontsize=9.5, color=INK)
        axis.grid(axis="x", color="#e4e4e4", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.tick_params(length=0, colors=INK)
        for side in axis.spines.values():
            side.set_visible(False)
    figure.legend(
        handles=[
            Patch(color=HIT, label="prefix-cache hit"),
            Patch(color=PASS, label="computed, one bar a pass of the model"),
            Line2D([], [], color=STATE, linewidth=2.4, label="state exported inside the pass"),
            Line2D([], [], color=STATE, marker="D", markersize=5, linestyle="", label="state kept at its end"),
        ],
        loc="lower center",
        ncols=4,
        frameon=False,
        fontsize=9.5,
    )
    figure.tight_layout(rect=(0, 0.07, 1, 1), w_pad=2.5)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_turn(axis: Any, row: int, record: TurnRecord) -> None:
    if record.cached:
        axis.barh(row, record.cached, height=BAR, color=HIT)
        axis.text(record.cached / 2, row, f"{record.cached:,} cached", ha="center", va="center", fontsize=8)
    gap = record.prompt * 0.006
    for span in record.spans:
        axis.barh(row, span.end - span.start - gap, left=span.start + gap / 2, height=BAR, color=PASS)
        axis.vlines(span.checkpoints, row - BAR * 0.72, row + BAR * 0.72, color=STATE, linewidth=2.4)
        if span.end in record.retained and span.end < record.prompt:
            axis.plot(span.end, row - BAR * 0.62, marker="D", markersize=5, color=STATE)
    plural = "pass" if record.passes == 1 else "passes"
    axis.text(record.prompt * 1.01, row, f"{record.passes} {plural}", va="center", fontsize=8.5, color=INK)
