# SPDX-License-Identifier: Apache-2.0
"""`kda-prefill layout`: what a hybrid model's KV cache holds, in stock's layout and in split ones."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_kda_prefill.console import check, check_model, quietly
from vllm_kda_prefill.paths import ModelFolder

if TYPE_CHECKING:
    from vllm_kda_prefill.layout.report import CacheReport

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def read_memory(text: str) -> int:
    """Bytes of `24GiB`, `24G`, `25.8GB` or a plain number.

    Raises:
        typer.BadParameter: It is no amount of memory.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"--memory: {text!r} is no amount of memory; give one like 24GiB")
    return int(float(match[1]) * UNITS[match[2] or ""])


def layout(
    model: ModelFolder = None,
    tp: Annotated[int, typer.Option(help="Tensor parallel ranks.", min=1)] = 1,
    dcp: Annotated[int, typer.Option(help="Decode context parallel ranks; divides --tp.", min=1)] = 1,
    mtp: Annotated[int, typer.Option(help="Draft tokens of multi-token prediction (GLM-5.3-Flash).", min=0)] = 0,
    kv_cache_dtype: Annotated[str, typer.Option(help="As vLLM's option of this name.")] = "auto",
    memory: Annotated[str, typer.Option(help="KV cache memory of one rank.")] = "24GiB",
    max_model_len: Annotated[int | None, typer.Option(help="As vLLM's option of this name.", min=1)] = None,
    target: Annotated[int | None, typer.Option(help="Tokens of an attention block, with --mamba.", min=1)] = None,
    mamba: Annotated[int | None, typer.Option(help="Tokens of a Mamba block, with --target.", min=1)] = None,
    capability: Annotated[int, typer.Option(help="Major compute capability of the GPU: 9, 10 or 12.")] = 9,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show vLLM's log.")] = False,
) -> None:
    """Show how vLLM cuts up the KV cache: blocks, padding, tokens, requests, and what retained states cost."""

    check_model(model, mtp, glm_only=False)
    check("--dcp", dcp, tp % dcp == 0, f"give a divisor of --tp, {tp}")
    check("--capability", capability, capability in (9, 10, 12), "give 9, 10 or 12")
    together = "give --target and --mamba together"
    check("--target", target, target is None or mamba is not None, together)
    check("--mamba", mamba, mamba is None or target is not None, together)
    size = read_memory(memory)
    check("--memory", memory, size > 0, "give more than nothing")

    def run() -> CacheReport:
        from vllm_kda_prefill.layout.report import BlockSizes, EngineShape, make_report

        shape = EngineShape(model, tp, dcp, mtp, kv_cache_dtype, max_model_len, capability)
        return make_report(shape, size, BlockSizes(target, mamba) if target and mamba else None)

    given = {"--tp": tp, "--dcp": dcp, "--kv-cache-dtype": kv_cache_dtype, "--max-model-len": max_model_len}
    report = quietly(run, verbose, given=given)
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        from vllm_kda_prefill.layout.table import print_layouts

        print_layouts(report)
