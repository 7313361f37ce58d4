# SPDX-License-Identifier: Apache-2.0
"""`kda-prefill doctor`: one command that checks a host before a server starts."""

from __future__ import annotations

import json
import logging
import os
import re
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_kda_prefill.console import AsJson, Verbose, check

if TYPE_CHECKING:
    from vllm_kda_prefill.doctor.engine import Flags
    from vllm_kda_prefill.doctor.findings import Finding
    from vllm_kda_prefill.doctor.hardware import Capability


def read_capability(text: str) -> tuple[int, int] | None:
    """Major and minor compute capability of `12.1`, `12` or `121`; None where nothing is given.

    Raises:
        typer.BadParameter: It is no compute capability.
    """
    if not text:
        return None
    match = re.fullmatch(r"(\d{1,2})\.(\d)|(\d{1,3})", text, re.ASCII)
    if match is None:
        raise typer.BadParameter(f"--capability {text!r}: give one like 12.1")
    if match[1]:
        return int(match[1]), int(match[2])
    number = int(match[3])  # 12, or 121 as in SM121.
    return divmod(number, 10) if number >= 20 else (number, 0)


def doctor(
    model: Annotated[
        str | None,
        typer.Option(help="Folder of the model, or the name of one that was downloaded; default GLM-5.3-Flash shapes."),
    ] = None,
    tp: Annotated[int, typer.Option("--tp", "--tensor-parallel-size", help="Tensor parallel ranks.", min=1)] = 1,
    dcp: Annotated[
        int, typer.Option("--dcp", "--decode-context-parallel-size", help="Decode context parallel ranks.", min=1)
    ] = 1,
    mtp: Annotated[int, typer.Option(help="Draft tokens of multi-token prediction.", min=0)] = 0,
    kv_cache_dtype: Annotated[str, typer.Option(help="As vLLM's option of this name.")] = "auto",
    cp_kv_cache_interleave_size: Annotated[int, typer.Option(help="As vLLM's option of this name.", min=1)] = 1,
    max_model_len: Annotated[int | None, typer.Option(help="As vLLM's option of this name.", min=1)] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="As vLLM's option of this name.")] = 0.92,
    block_size: Annotated[int | None, typer.Option(help="As vLLM's option of this name.", min=1)] = None,
    attention_backend: Annotated[str | None, typer.Option(help="As vLLM's option of this name.")] = None,
    kda_prefill_backend: Annotated[str, typer.Option(help="What --additional-config names.")] = "auto",
    capability: Annotated[str, typer.Option(help="Compute capability to check for, as 12.1; default this GPU's.")] = "",
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Check this host before a server starts: vLLM, GPU, kernels, block sizes, memory, variables.

    Exit status 1 where a line is red: with the gate on, a server would not start.
    """
    assumed = read_capability(capability)
    check("--model", repr(model), model != "", "name a folder or a model, or leave it out")
    usable = 0 < gpu_memory_utilization <= 1
    check("--gpu-memory-utilization", gpu_memory_utilization, usable, "give more than 0 and at most 1")

    from vllm_kda_prefill.doctor.engine import Flags
    from vllm_kda_prefill.doctor.findings import as_json as in_json
    from vllm_kda_prefill.doctor.findings import exit_status

    flags = Flags(
        model=model,
        tp=tp,
        dcp=dcp,
        mtp=mtp,
        kv_cache_dtype=kv_cache_dtype,
        interleave=cp_kv_cache_interleave_size,
        max_model_len=max_model_len,
        utilization=gpu_memory_utilization,
        backend=kda_prefill_backend,
        attention_backend=attention_backend,
        block_size=block_size,
    )
    findings = _examine(flags, assumed, verbose)
    if as_json:
        print(json.dumps(in_json(findings)))
    else:
        from vllm_kda_prefill.doctor.table import print_findings

        print_findings(findings)
    raise typer.Exit(exit_status(findings))


def _examine(flags: Flags, assumed: Capability | None, verbose: bool) -> list[Finding]:
    from vllm_kda_prefill.doctor.examine import examine

    if not verbose:
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        logging.disable(logging.WARNING)
    return examine(flags, assumed)
