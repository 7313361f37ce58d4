# SPDX-License-Identifier: Apache-2.0
"""Tables of what was asked of the scheduler without a GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from vllm_kda_prefill.bench.records import Record
from vllm_kda_prefill.bench.summary import Section


def growth(samples: Sequence[Record]) -> Section | None:
    """Passes, states and bytes by prompt length."""
    rows = []
    for sample in samples:
        if sample["suite"] == "planned growth":
            states, size = sample["states"], sample["bytes_per_state"]
            rows.append(
                (
                    f"{sample['size']:,}",
                    str(sample["stock_passes"]),
                    str(len(sample["stock_states"])),
                    str(sample["passes"]),
                    str(len(states)),
                    str(sample["equal_retention_passes"]),
                    f"{len(states) * size / 1e6:,.0f}",
                    f"{len(sample['stock_states']) * size / 1e6:,.0f}",
                )
            )
    header = (
        "prompt",
        "stock: passes",
        "states",
        "ladder: passes",
        "states",
        "equal retention: passes",
        "MB of states",
        "stock's MB",
    )
    note = "From vLLM's real scheduler; bytes over all KDA layers and ranks, unpadded."
    return Section("Growth with the prompt", header, rows, note) if rows else None


def reuse(samples: Sequence[Record]) -> Section | None:
    """Cached share by branching and KV cache size."""
    groups: dict[tuple[float, float], dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        if sample["suite"] == "reuse":
            groups[sample["branching"], -sample["part"]][sample["arm"]].append(sample)
    rows = []
    for (branching, part), arms in sorted(groups.items()):
        stock = arms.get("stock", [])
        for arm, runs in arms.items():
            share = sum(run["cached"] for run in runs) / sum(run["prompt"] for run in runs)
            ratios = [run["cached"] / base["cached"] for run, base in zip(runs, stock, strict=False) if base["cached"]]
            total = sum(run["cached"] for run in runs) / max(sum(base["cached"] for base in stock), 1)
            rows.append(
                (
                    f"{branching:.2f}",
                    f"{-part:g}",
                    f"{sum(run['cache_blocks'] for run in runs) // len(runs):,}",
                    arm,
                    f"{share:.1%}",
                    f"{total:.3f} ({min(ratios, default=0):.3f})" if arm != "stock" else "-",
                    f"{sum(run['passes'] for run in runs) / len(runs):.0f}",
                    f"{sum(run['evicted_states'] for run in runs) / len(runs):.0f}",
                    f"{sum(run['held_states'] for run in runs) / len(runs):.0f}",
                    f"{sum(run['held_bytes'] for run in runs) / len(runs) / 1e9:.1f}",
                )
            )
    header = (
        "branching",
        "of ample memory",
        "blocks",
        "arm",
        "cached share",
        "cached vs stock (worst trace)",
        "passes",
        "states evicted",
        "states held",
        "GB held",
    )
    note = "From vLLM's real scheduler, one turn at a time; means over the traces. Bytes over all KDA layers and ranks."
    return Section("Cached tokens of conversations by KV cache size", header, rows, note) if rows else None


def sections(records: Sequence[Record]) -> list[Section]:
    """Every table that planned samples give."""
    samples = [record for record in records if record["kind"] == "sample"]
    return [section for section in (growth(samples), reuse(samples)) if section is not None]
