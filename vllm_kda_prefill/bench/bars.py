# SPDX-License-Identifier: Apache-2.0
"""What the measurements are held against, met or missed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_kda_prefill.bench import summary
from vllm_kda_prefill.bench.stats import Ratio
from vllm_kda_prefill.bench.summary import Samples, Section, ratio_by_turn, ratio_of, speed_up

AGAINST_EQUAL = {8192: 1.50, 16384: 1.10, 32768: 1.05}
AGAINST_STOCK = 0.99
BRANCHES = {7400: 4.0, 6500: 2.7, 5000: 2.0}
DECODE = 0.98
CACHED = {"": 2.0, "@": 1.0}


@dataclass(frozen=True)
class Bar:
    """One aim.

    Attributes:
        what: What was measured.
        least: The least ratio that meets it.
        ratio: What came out.
    """

    what: str
    least: float
    ratio: Ratio

    @property
    def verdict(self) -> str:
        """`met`, `missed`, or which of them the interval leaves open."""
        if self.ratio.low >= self.least:
            return "met"
        if self.ratio.high < self.least:
            return "missed"
        return "met, within the noise" if self.ratio.value >= self.least else "missed, within the noise"


def _cold(samples: Samples) -> Iterator[Bar]:
    groups = samples.groups("cold", "size")
    for base in ("equal", "equal-ends"):
        for size, least in AGAINST_EQUAL.items():
            ratio = speed_up(groups, "ladder", base, (size,))
            if ratio:
                yield Bar(f"cold {size:,} tokens, {base} over ladder", least, ratio)
    for size in AGAINST_EQUAL:
        ratio = speed_up(groups, "ladder", "stock", (size,))
        if ratio:
            yield Bar(f"cold {size:,} tokens, stock over ladder", AGAINST_STOCK, ratio)


def _branches(samples: Samples) -> Iterator[Bar]:
    for suite, cache in summary.BRANCHES.items():
        groups = samples.groups(suite, "point")
        for point, least in BRANCHES.items():
            ratio = speed_up(groups, "ladder", "stock", (point,))
            if ratio:
                yield Bar(f"branch that leaves 8,192 tokens at {point:,}, {cache}, stock over ladder", least, ratio)


def _decode(samples: Samples) -> Iterator[Bar]:
    groups = samples.groups("decode", "context", "requests")
    for shape, ours in groups.get("ladder", {}).items():
        theirs = groups.get("stock", {}).get(shape)
        if theirs:
            ratio = ratio_of(ours, theirs, "steps_per_second")
            yield Bar(f"decode steps/s, C{shape[1]} at {shape[0]:,}, ladder over stock", DECODE, ratio)


def _conversations(samples: Samples) -> Iterator[Bar]:
    groups = samples.groups("conversations")
    for arm, shapes in groups.items():
        kind, at, blocks = arm.partition("@")
        base = groups.get("stock" + at + blocks, {}).get(())
        if kind == "ladder" and base:
            cache = f"with {blocks} blocks" if at else "with ample memory"
            ratio = ratio_by_turn(shapes[()], base, "cached")
            if ratio:
                yield Bar(f"conversations, cached tokens {cache}, ladder over stock", CACHED[at], ratio)


def section(samples: Samples) -> Section | None:
    """Every bar that the samples speak to."""
    bars = [bar for suite in (_cold, _branches, _decode, _conversations) for bar in suite(samples)]
    rows = [(bar.what, f"{bar.least:.2f}", str(bar.ratio), bar.verdict) for bar in bars]
    note = "Ratios with their 95 % interval; a verdict is within the noise where the interval has the bar in it."
    return Section("Held against the bars", ("ratio", "at least", "measured", "verdict"), rows, note) if rows else None
