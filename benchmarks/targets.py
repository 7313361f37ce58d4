# SPDX-License-Identifier: Apache-2.0
"""The project's own targets, held against measurements: `python -m benchmarks.targets FOLDER`.

FOLDER is where `kda-prefill bench` has written its .jsonl files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from vllm_kda_prefill.bench import summary
from vllm_kda_prefill.bench.records import read
from vllm_kda_prefill.bench.stats import Ratio
from vllm_kda_prefill.bench.summary import Samples, Section, ratio_by_turn, ratio_of, speed_up
from vllm_kda_prefill.bench.tables import print_sections

AGAINST_EQUAL = {8192: 1.50, 16384: 1.10, 32768: 1.05}
AGAINST_STOCK = 0.99
BRANCHES = {7400: 4.0, 6500: 2.7, 5000: 2.0}
DECODE = 0.98
CACHED = {"": 2.0, "@": 1.0}


@dataclass(frozen=True)
class Target:
    """One target.

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


def _cold(samples: Samples) -> Iterator[Target]:
    groups = samples.groups("cold", "size")
    for size, least in AGAINST_EQUAL.items():
        ratio = speed_up(groups, "ladder", "equal", (size,))
        if ratio:
            yield Target(f"cold {size:,} tokens, equal over ladder", least, ratio)
    for size in AGAINST_EQUAL:
        ratio = speed_up(groups, "ladder", "stock", (size,))
        if ratio:
            yield Target(f"cold {size:,} tokens, stock over ladder", AGAINST_STOCK, ratio)


def _branches(samples: Samples) -> Iterator[Target]:
    for suite, cache in summary.BRANCHES.items():
        groups = samples.groups(suite, "point")
        for point, least in BRANCHES.items():
            ratio = speed_up(groups, "ladder", "stock", (point,))
            if ratio:
                yield Target(f"branch that leaves 8,192 tokens at {point:,}, {cache}, stock over ladder", least, ratio)


def _decode(samples: Samples) -> Iterator[Target]:
    groups = samples.groups("decode", "context", "requests")
    for shape, ours in groups.get("ladder", {}).items():
        theirs = groups.get("stock", {}).get(shape)
        if theirs:
            ratio = ratio_of(ours, theirs, "steps_per_second")
            yield Target(f"decode steps/s, C{shape[1]} at {shape[0]:,}, ladder over stock", DECODE, ratio)


def _conversations(samples: Samples) -> Iterator[Target]:
    groups = samples.groups("conversations")
    for arm, shapes in groups.items():
        kind, at, blocks = arm.partition("@")
        base = groups.get("stock" + at + blocks, {}).get(())
        if kind == "ladder" and base:
            cache = f"with {blocks} blocks" if at else "with ample memory"
            ratio = ratio_by_turn(shapes[()], base, "cached")
            if ratio:
                yield Target(f"conversations, cached tokens {cache}, ladder over stock", CACHED[at], ratio)


def section(samples: Samples) -> Section | None:
    """Every target that the samples speak to."""
    targets = [target for suite in (_cold, _branches, _decode, _conversations) for target in suite(samples)]
    rows = [(target.what, f"{target.least:.2f}", str(target.ratio), target.verdict) for target in targets]
    header = ("ratio", "at least", "measured", "verdict")
    note = "Ratios with their 95 % interval; a verdict is within the noise where the interval has the target in it."
    return Section("Held against the targets", header, rows, note) if rows else None


def main(folder: Annotated[Path, typer.Argument(help="Folder with the .jsonl files of runs.")]) -> None:
    """Print a table of verdicts for each run in a folder."""
    found = {path.stem: section(Samples(read(path))) for path in sorted(folder.glob("*.jsonl"))}
    shown = [replace(verdicts, title=f"{run}: targets") for run, verdicts in found.items() if verdicts]
    if not shown:
        print(f"error: {folder}: no run that a target speaks of; name the folder of .jsonl files", file=sys.stderr)
        raise typer.Exit(1)
    print_sections(shown)


if __name__ == "__main__":
    typer.run(main)
