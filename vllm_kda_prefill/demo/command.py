# SPDX-License-Identifier: Apache-2.0
"""`kda-prefill demo`: a conversation with branches, served and checked on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_kda_prefill.console import AsJson, Dcp, Mtp, Policy, PolicyName, Verbose, check_engine, quietly
from vllm_kda_prefill.paths import check_plot

if TYPE_CHECKING:
    from vllm_kda_prefill.demo.conversation import Conversation


def demo(
    dcp: Dcp = 1,
    mtp: Mtp = 3,
    policy: Policy = PolicyName.LADDER,
    plot: Annotated[Path | None, typer.Option(help="Draw the timeline into this PNG, SVG or PDF.")] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Serve a conversation with branches on a toy model, coalesced and stock, and check every answer.

    Exit status 1 if an answer differs from the same prompt computed without a cache.
    """
    check_engine(dcp, mtp)
    if plot is not None:
        check_plot(plot)

    from vllm_kda_prefill.demo.table import print_demo, progress

    with progress() as bar:
        task = bar.add_task("starting vLLM", total=None)

        def run() -> Conversation:
            from vllm_kda_prefill.demo.conversation import Conversation
            from vllm_kda_prefill.planning import Layout

            conversation = Conversation(Layout(dcp=dcp, mtp=mtp, num_blocks=400), policy.value)
            bar.update(task, total=conversation.steps)
            for arm, record in conversation.play():
                bar.update(task, advance=1, description=f"{record.turn.name} ({arm})")
            return conversation

        conversation = quietly(run, verbose, spinner=False)
    if plot is not None:
        from vllm_kda_prefill.demo.timeline import draw

        draw(conversation, plot)
    if as_json:
        print(json.dumps(conversation.as_json()))
    else:
        print_demo(conversation, plot)
    if not conversation.all_equal:
        raise typer.Exit(1)
