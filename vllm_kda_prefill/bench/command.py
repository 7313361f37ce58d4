# SPDX-License-Identifier: Apache-2.0
"""`kda-prefill bench`: its commands, and the report of what they measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_kda_prefill.bench.ab_command import ab
from vllm_kda_prefill.bench.scheduler.commands import growth, reuse
from vllm_kda_prefill.bench.url_commands import branches, conversations, decode, prefill
from vllm_kda_prefill.console import OLD_NAMES, fail
from vllm_kda_prefill.paths import check_output
from vllm_kda_prefill.trace.command import trace

app = typer.Typer(
    help="Serving measurements: time to first token, branch reuse, decode, growth, and their report.",
    no_args_is_help=True,
)
for command in (prefill, branches, decode, conversations):
    app.command()(command)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, **OLD_NAMES})(ab)
app.command(context_settings=OLD_NAMES)(growth)
app.command()(reuse)
app.command(context_settings=OLD_NAMES)(trace)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder with the .jsonl files of runs.")],
    output: Annotated[Path | None, typer.Option(help="Folder to write to; default the same.")] = None,
) -> None:
    """Render one self-contained HTML page, its plots as PNGs, and the tables in Markdown."""
    check_output(output or folder, is_folder=True)
    from vllm_kda_prefill.bench.errors import BenchError
    from vllm_kda_prefill.bench.report import render

    try:
        for path in render(folder, output or folder):
            print(path)
    except BenchError as error:
        fail(str(error))
