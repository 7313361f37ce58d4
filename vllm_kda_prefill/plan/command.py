# SPDX-License-Identifier: Apache-2.0
"""`kda-prefill plan`: one prompt, coalesced and stock."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_kda_prefill.console import (
    MAX_PROMPT,
    AsJson,
    Dcp,
    Mtp,
    Policy,
    PolicyName,
    Verbose,
    check,
    check_block,
    check_engine,
    check_model,
    fail,
    quietly,
)
from vllm_kda_prefill.paths import ModelFolder

if TYPE_CHECKING:
    from vllm_kda_prefill.plan.report import PlanReport


def plan(
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 8192,
    dcp: Dcp = 1,
    mtp: Mtp = 3,
    block_size: Annotated[int, typer.Option(help="Tokens of an attention block on one rank.")] = 512,
    mamba_block_size: Annotated[int, typer.Option(help="Tokens of a Mamba block.")] = 512,
    budget: Annotated[int, typer.Option(help="Tokens of one step.")] = 8192,
    policy: Policy = PolicyName.LADDER,
    cached: Annotated[int, typer.Option(help="Tokens of the prompt that are in the prefix cache.")] = 0,
    model: ModelFolder = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Ask vLLM's scheduler and KV cache manager what they do with one prompt, coalesced and stock."""
    check("--prompt", prompt, 1 <= prompt <= MAX_PROMPT, f"give 1 to {MAX_PROMPT} tokens")
    check_engine(dcp, mtp)
    check_block("--block-size", block_size)
    check(
        "--mamba-block-size",
        mamba_block_size,
        mamba_block_size > 0 and mamba_block_size % block_size == 0,
        f"give a multiple of --block-size, {block_size} tokens",
    )
    check("--budget", budget, budget > mtp, f"give at least {mtp + 1} tokens, one more than --mtp")
    check("--cached", cached, 0 <= cached < prompt, f"give 0 to {prompt - 1} tokens, less than --prompt")
    check_model(model, mtp)

    def run() -> PlanReport:
        from vllm_kda_prefill.plan.report import UnreachableHitError, make_report
        from vllm_kda_prefill.planning import Layout

        layout = Layout(
            attention_block=block_size,
            mamba_block=mamba_block_size,
            dcp=dcp,
            mtp=mtp,
            budget=budget,
            num_blocks=2 * MAX_PROMPT // min(block_size, mamba_block_size) + 1000,
            max_seqs=1,
            model=model,
        )
        try:
            return make_report(layout, policy.value, prompt, cached)
        except UnreachableHitError as error:
            fail(f"--cached: {error}")

    report = quietly(run, verbose, given={"--dcp": dcp})
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        from vllm_kda_prefill.plan.table import print_plan

        print_plan(report)
