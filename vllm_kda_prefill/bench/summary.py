# SPDX-License-Identifier: Apache-2.0
"""Records to figures: medians, and ratios with their intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_kda_prefill.bench.arms import KINDS, arm_of
from vllm_kda_prefill.bench.records import Record
from vllm_kda_prefill.bench.stats import Ratio, Spread, ratio_of_medians, ratio_of_sums

Row = tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """One table.

    Attributes:
        title: What was measured.
        header: Names of the columns.
        rows: One for each of an arm's shapes.
        note: How to read it.
    """

    title: str
    header: Row
    rows: Sequence[Row]
    note: str = ""


class Samples:
    """Samples of one run, by suite, arm and shape."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.all = [record for record in records if record["kind"] == "sample"]

    def groups(self, suite: str, *shape: str) -> dict[str, dict[tuple, list[Record]]]:
        """Arm -> values of `shape` -> samples of all its servers, in the order of the run."""
        found: dict[str, dict[tuple, list[Record]]] = defaultdict(lambda: defaultdict(list))
        for sample in self.all:
            if sample["suite"] == suite:
                found[arm_of(sample["arm"])][tuple(sample[name] for name in shape)].append(sample)
        return {arm: dict(found[arm]) for arm in sorted(found, key=rank)}


def by_server(samples: Sequence[Record]) -> list[list[Record]]:
    """An arm's samples, those of a server together."""
    found: dict[str, list[Record]] = defaultdict(list)
    for sample in samples:
        found[sample["arm"]].append(sample)
    return [found[server] for server in sorted(found)]


def rank(arm: str) -> tuple[int, str]:
    """Where an arm comes in tables: by what it is, then by its cache."""
    kinds = list(KINDS)
    kind = arm.partition("@")[0]
    return (kinds.index(kind) if kind in kinds else len(kinds), arm)


def values(samples: Sequence[Record], name: str) -> list[float]:
    return [sample[name] for sample in samples]


def count_of(samples: Sequence[Record]) -> str:
    """How many samples, and of how many servers if of several."""
    servers = len(by_server(samples))
    return f"{len(samples)} of {servers} servers" if servers > 1 else str(len(samples))


def cold_rates(samples: Sequence[Record]) -> list[float]:
    """Prompt tokens over time to first token."""
    return [sample["prompt"] / sample["ttft"] for sample in samples]


def ratio_of(above: Sequence[Record], below: Sequence[Record], name: str) -> Ratio:
    """Ratio of the medians of field `name`."""
    left, right = ([values(same, name) for same in by_server(side)] for side in (above, below))
    return ratio_of_medians(left, right)


def ratio_by_turn(above: Sequence[Record], below: Sequence[Record], name: str) -> Ratio | None:
    """Ratio of the sums of field `name` over the turns that every server of both sides has served."""
    served = [
        [{(turn["trace"], turn["turn"]): turn[name] for turn in same} for same in by_server(side)]
        for side in (above, below)
    ]
    common = set.intersection(*(set(server) for side in served for server in side))
    left, right = ([[server[turn] for turn in sorted(common)] for server in side] for side in served)
    return ratio_of_sums(left, right) if any(map(any, right)) else None


def speed_up(groups: dict[str, dict[tuple, list[Record]]], arm: str, base: str, shape: tuple) -> Ratio | None:
    """How many times sooner `arm` gives its first token than `base`."""
    ours, theirs = groups.get(arm, {}).get(shape), groups.get(base, {}).get(shape)
    return ratio_of(theirs, ours, "ttft") if ours and theirs else None


def size_of_cache(arm: str) -> str:
    """`@BLOCKS` of an arm's name, or nothing."""
    return arm[arm.index("@") :] if "@" in arm else ""


def base_of(arm: str) -> str:
    """The stock arm that an arm is compared with."""
    return "stock" + size_of_cache(arm)


def text_of(ratio: Ratio | None) -> str:
    return str(ratio) if ratio else "-"


def milliseconds(spread: Spread) -> str:
    return f"{spread.median * 1e3:.1f} ({spread.low * 1e3:.1f} to {spread.high * 1e3:.1f})"


def cold(samples: Samples, suite: str = "cold") -> Section | None:
    """Cold prompts: TTFT, rate, and how many times sooner than stock and than equal retention."""
    groups = samples.groups(suite, "size")
    rows = []
    for size in sorted({shape for shapes in groups.values() for shape in shapes}):
        for arm, shapes in groups.items():
            if size not in shapes:
                continue
            ttft, rate = Spread.of(values(shapes[size], "ttft")), Spread.of(cold_rates(shapes[size]))
            ratios = [
                text_of(speed_up(groups, arm, base + size_of_cache(arm), size)) if not arm.startswith(base) else ""
                for base in ("stock", "equal")
            ]
            rows.append(
                (f"{size[0]:,}", arm, count_of(shapes[size]), milliseconds(ttft), f"{rate.median:,.0f}", *ratios)
            )
    if not rows:
        return None
    header = ("prompt", "arm", "n", "TTFT ms", "tokens/s", "vs stock", "vs equal")
    note = "Median (quartiles). A ratio is the other arm's median TTFT over this one's, with its 95 % interval."
    title = "Cold prompts" if suite == "cold" else "Time to first token by prompt length"
    return Section(title, header, rows, note)


BRANCHES = {"branches": "in the cache as it was", "branches-room": "in a cache with room"}
"""Suites of follow-ups, and what their cache was like."""


def branches(samples: Samples, suite: str) -> Section | None:
    """Follow-ups that leave an 8K prompt."""
    groups = samples.groups(suite, "point")
    rows = []
    for point in sorted({shape for shapes in groups.values() for shape in shapes}, reverse=True):
        for arm, shapes in groups.items():
            if point in shapes:
                ttft = Spread.of(values(shapes[point], "ttft"))
                cached = sorted({f"{sample['cached']:,}" for sample in shapes[point]})
                ratio = speed_up(groups, arm, base_of(arm), point) if arm != base_of(arm) else None
                rows.append(
                    (
                        f"{point[0]:,}",
                        arm,
                        count_of(shapes[point]),
                        " / ".join(cached),
                        milliseconds(ttft),
                        text_of(ratio),
                    )
                )
    header = ("leaves at", "arm", "n", "cached tokens", "TTFT ms", "times sooner than stock")
    return Section(f"Branches off an 8,192-token prompt, {BRANCHES[suite]}", header, rows) if rows else None


def decode(samples: Samples) -> Section | None:
    """Decoding rates."""
    groups = samples.groups("decode", "context", "requests")
    rows = []
    for shape in sorted({shape for shapes in groups.values() for shape in shapes}):
        for arm, shapes in groups.items():
            if shape not in shapes:
                continue
            tokens, steps, acceptance = (
                Spread.of(values(shapes[shape], name))
                for name in ("tokens_per_second", "steps_per_second", "acceptance_length")
            )
            theirs = groups.get(base_of(arm), {}).get(shape)
            ratio = None
            if theirs and arm != base_of(arm):
                ratio = ratio_of(shapes[shape], theirs, "steps_per_second")
            rows.append(
                (
                    f"C{shape[1]}, {shape[0]:,}",
                    arm,
                    count_of(shapes[shape]),
                    f"{tokens.median:.1f}",
                    f"{acceptance.median:.2f}",
                    f"{steps.median:.1f} ({steps.low:.1f} to {steps.high:.1f})",
                    text_of(ratio),
                )
            )
    header = ("requests, context", "arm", "n", "tokens/s", "acceptance", "steps/s", "steps/s vs stock")
    return Section("Decode", header, rows) if rows else None


def conversations(samples: Samples) -> Section | None:
    """Turns of the branch workload: cached share and TTFT by kind of turn."""
    groups = samples.groups("conversations")
    kinds = samples.groups("conversations", "what")
    rows = []
    for arm, shapes in groups.items():
        turns = shapes[()]
        share = sum(values(turns, "cached")) / sum(values(turns, "prompt"))
        base = groups.get(base_of(arm), {}).get(())
        cached_ratio = ttft_ratio = None
        if base and arm != base_of(arm):
            cached_ratio = ratio_by_turn(turns, base, "cached")
            ttft_ratio = ratio_by_turn(base, turns, "ttft")
        by_kind = [
            milliseconds(Spread.of(values(kinds[arm][(kind,)], "ttft"))) if (kind,) in kinds[arm] else "-"
            for kind in ("first", "extend", "branch")
        ]
        rows.append((arm, count_of(turns), f"{share:.1%}", text_of(cached_ratio), *by_kind, text_of(ttft_ratio)))
    header = (
        "arm",
        "turns",
        "cached share",
        "cached vs stock",
        "TTFT first, ms",
        "TTFT extending, ms",
        "TTFT branching, ms",
        "all waits, times shorter than stock",
    )
    return Section("Conversations that extend and branch", header, rows) if rows else None


def sections(records: Sequence[Record]) -> list[Section]:
    """Every table that a run's samples give."""
    samples = Samples(records)
    found = [
        cold(samples),
        *(branches(samples, suite) for suite in BRANCHES),
        decode(samples),
        conversations(samples),
        cold(samples, "growth"),
    ]
    return [section for section in found if section is not None]
