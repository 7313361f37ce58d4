# SPDX-License-Identifier: Apache-2.0
"""The plots of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from vllm_kda_prefill.bench.records import Record
from vllm_kda_prefill.bench.stats import Spread
from vllm_kda_prefill.bench.summary import Samples, values

INK = "#333333"
COLORS = {
    "stock": "#8d99ae",
    "ladder": "#1d3557",
    "replay": "#5b8fc7",
    "equal": "#e8833a",
}
SIZE = (8.0, 4.2)


def color(arm: str) -> str:
    return COLORS.get(arm.partition("@")[0], "#2a9d8f")


def draw(records: Sequence[Record], name: str, folder: Path) -> list[Path]:
    """Draw what the run's samples give into `folder`, as `NAME-PLOT.png`."""
    samples = Samples(records)
    plots: dict[str, Callable[[Samples, Any], bool]] = {
        **COMPARISONS,
        "growth": _growth,
        "states": _states,
        "reuse": _reuse,
    }
    written = []
    for plot, fill in plots.items():
        figure, axis = plt.subplots(figsize=SIZE)
        if fill(samples, axis):
            _dress(axis)
            figure.tight_layout()
            path = folder / f"{name}-{plot}.png"
            figure.savefig(path, dpi=130)
            written.append(path)
        plt.close(figure)
    return written


def _dress(axis: Any) -> None:
    axis.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(length=0, colors=INK)
    for side in axis.spines.values():
        side.set_visible(False)
    handles, _ = axis.get_legend_handles_labels()
    if handles:
        axis.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=4)


def _bars(
    axis: Any, groups: dict[str, dict[tuple, list[Record]]], shapes: list[tuple], name: str, scale: float
) -> None:
    """A bar of the median for each arm and shape, with its quartiles."""
    width = 0.8 / len(groups)
    for place, (arm, found) in enumerate(groups.items()):
        spreads = [(x, Spread.of(values(found[shape], name))) for x, shape in enumerate(shapes) if shape in found]
        at = [x + (place - (len(groups) - 1) / 2) * width for x, _ in spreads]
        medians = [spread.median * scale for _, spread in spreads]
        below = [(spread.median - spread.low) * scale for _, spread in spreads]
        above = [(spread.high - spread.median) * scale for _, spread in spreads]
        axis.bar(at, medians, width * 0.92, yerr=[below, above], ecolor=INK, capsize=2, color=color(arm), label=arm)
        for x, median in zip(at, medians, strict=True):
            axis.text(x, median, f" {median:,.0f}", ha="center", va="bottom", fontsize=7.5, color=INK)


def _shapes(groups: dict[str, dict[tuple, list[Record]]]) -> list[tuple]:
    return sorted({shape for found in groups.values() for shape in found})


@dataclass(frozen=True)
class Comparison:
    """A plot with a bar for each arm and shape of a suite.

    Attributes:
        suite: Whose samples.
        shape: Fields of a sample that tell its bars apart.
        label: What a shape is called below its bars, given its fields.
        title: What was measured.
        value: The field of a sample that is drawn.
        scale: What it is multiplied by.
        unit: What the axis then shows.
    """

    suite: str
    shape: tuple[str, ...]
    label: Callable[..., str]
    title: str
    value: str = "ttft"
    scale: float = 1e3
    unit: str = "time to first token, ms"

    def __call__(self, samples: Samples, axis: Any) -> bool:
        groups = samples.groups(self.suite, *self.shape)
        shapes = _shapes(groups)
        if shapes:
            _bars(axis, groups, shapes, self.value, self.scale)
            axis.set_xticks(range(len(shapes)), [self.label(*shape) for shape in shapes])
            axis.set_ylabel(self.unit)
            axis.set_title(f"{self.title}: median, quartiles", fontsize=11, color=INK)
        return bool(shapes)


TURNS = {"branch": "renders it again", "extend": "extends the history", "first": "first turn"}


def _leaves(point: int) -> str:
    return f"leaves at {point:,}"


COMPARISONS = {
    "cold": Comparison("cold", ("size",), lambda size: f"{size:,} tokens", "Cold prompts"),
    "branches": Comparison(
        "branches", ("point",), _leaves, "Follow-ups that leave an 8,192-token prompt, in the cache as it was"
    ),
    "branches-room": Comparison(
        "branches-room", ("point",), _leaves, "Follow-ups that leave an 8,192-token prompt, in a cache with room"
    ),
    "conversations": Comparison("conversations", ("what",), TURNS.__getitem__, "Turns of conversations"),
    "decode": Comparison(
        "decode",
        ("requests", "context"),
        lambda requests, context: f"C{requests}, {context:,}",
        "Decode",
        value="steps_per_second",
        scale=1.0,
        unit="decode steps a second",
    ),
}


def _growth(samples: Samples, axis: Any) -> bool:
    groups = samples.groups("growth", "size")
    if not groups:
        return False
    for arm, found in groups.items():
        sizes = sorted(found)
        medians = [Spread.of(values(found[size], "ttft")).median * 1e3 for size in sizes]
        axis.plot([size[0] for size in sizes], medians, marker="o", color=color(arm), label=arm)
    _log_tokens(axis, [size[0] for size in _shapes(groups)])
    axis.set_yscale("log")
    axis.set_ylabel("time to first token, ms")
    axis.set_title("Cold prompts by length: median", fontsize=11, color=INK)
    return True


def _states(samples: Samples, axis: Any) -> bool:
    found = [sample for sample in samples.all if sample["suite"] == "planned growth"]
    if not found:
        return False
    sizes = [sample["size"] for sample in found]
    lines = {
        "passes: stock, ladder": ("ladder", [s["passes"] for s in found], "-"),
        "passes: equal retention": ("equal", [s["equal_retention_passes"] for s in found], "-"),
        "states: stock": ("stock", [len(s["stock_states"]) for s in found], "--"),
        "states: ladder": ("replay", [len(s["states"]) for s in found], "--"),
    }
    for label, (arm, counts, style) in lines.items():
        axis.plot(sizes, counts, style, marker="o", color=color(arm), label=label)
    _log_tokens(axis, sizes)
    axis.set_ylabel("count")
    axis.set_title("Passes and retained states of a cold prompt", fontsize=11, color=INK)
    return True


def _log_tokens(axis: Any, sizes: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [f"{size // 1024}K" for size in sizes])
    axis.set_xlabel("prompt tokens")


def _reuse(samples: Samples, axis: Any) -> bool:
    groups = samples.groups("reuse", "branching", "part")
    if not groups:
        return False
    branching = sorted({shape[0] for shape in _shapes(groups)})
    styles = ["-", "--", "-.", ":"]
    for arm, found in groups.items():
        for index, probability in enumerate(branching):
            parts = sorted(part for at, part in found if at == probability)
            shares = [
                100 * sum(values(found[probability, part], "cached")) / sum(values(found[probability, part], "prompt"))
                for part in parts
            ]
            label = f"{arm}, {probability:.0%} branch"
            axis.plot(parts, shares, styles[index % 4], marker="o", markersize=4, color=color(arm), label=label)
    parts = sorted({shape[1] for shape in _shapes(groups)})
    axis.set_xscale("log", base=2)
    axis.set_xticks(parts, [f"{part:g}" for part in parts])
    axis.set_xlabel("KV cache, parts of ample")
    axis.set_ylabel("prompt tokens found cached, %")
    axis.set_title("Conversations in smaller caches, vLLM's scheduler", fontsize=11, color=INK)
    return True
