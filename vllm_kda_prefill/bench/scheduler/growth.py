# SPDX-License-Identifier: Apache-2.0
"""Passes, retained states and bytes by prompt length, from vLLM's real scheduler and KV cache manager."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vllm_kda_prefill.bench.records import Recorder
from vllm_kda_prefill.plan.report import make_report
from vllm_kda_prefill.planning import Layout


def measure(lengths: Sequence[int], dcp: int, mtp: int, page: int, output: Path) -> None:
    """Record what both schedulers do with a cold prompt of each length."""
    pages = 4 * max(lengths) // page + 1000
    layout = Layout(attention_block=page, mamba_block=page, dcp=dcp, mtp=mtp, num_blocks=pages, max_seqs=1)
    with Recorder(output, {"lengths": list(lengths), "dcp": dcp, "mtp": mtp, "page": page}) as recorder:
        for length in lengths:
            report = make_report(layout, "ladder", length)
            recorder.add(
                "sample",
                suite="planned growth",
                arm="scheduler",
                size=length,
                stock_passes=report.stock.passes,
                stock_states=list(report.stock.retained),
                passes=report.coalesced.passes,
                states=list(report.coalesced.retained),
                equal_retention_passes=report.equal_retention_passes,
                bytes_per_state=report.bytes_per_state,
            )
