# SPDX-License-Identifier: Apache-2.0
"""Passes, retained states and bytes by prompt length, from vLLM's real scheduler and KV cache manager."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vllm_kda_prefill.bench.records import Recorder
from vllm_kda_prefill.plan.report import make_report
from vllm_kda_prefill.planning import Layout


def measure(lengths: Sequence[int], dcp: int, mtp: int, block_tokens: int, output: Path) -> None:
    """Record what both schedulers do with a cold prompt of each length."""
    blocks = 4 * max(lengths) // block_tokens + 1000
    layout = Layout(block_tokens, block_tokens, dcp=dcp, mtp=mtp, num_blocks=blocks, max_seqs=1)
    with Recorder(output, {"lengths": list(lengths), "dcp": dcp, "mtp": mtp, "block_tokens": block_tokens}) as recorder:
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
