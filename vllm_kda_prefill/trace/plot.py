# SPDX-License-Identifier: Apache-2.0
"""Draws the cached share of a trace over the number of blocks."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from vllm_kda_prefill.trace.report import TraceReport


def draw(report: TraceReport, path: Path) -> None:
    """A line for each arm and one for foresight, in parts of what the unbounded cache finds.

    Args:
        report: With at least one size.
        path: A .png, .svg or .pdf file to write.
    """
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    whole = max(report.unbounded_tokens, 1)
    for arm in dict.fromkeys(row.arm for row in report.rows):
        points = sorted((row.num_blocks, row.replay.cached_tokens / whole) for row in report.rows if row.arm == arm)
        axes.plot(*zip(*points, strict=True), marker="o", label=arm)
    best = sorted({row.num_blocks: row.foresight_tokens / whole for row in report.rows}.items())
    axes.plot(*zip(*best, strict=True), marker=".", linestyle="--", color="gray", label="with foresight")
    axes.set_xscale("log")
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("blocks of the KV cache")
    axes.set_ylabel("cached tokens, of an unbounded cache's")
    axes.set_title(f"{report.trace.name}: {len(report.trace.prompts):,} requests, {report.load}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)
