# SPDX-License-Identifier: Apache-2.0
"""The `kda-prefill` command: plan one prompt, or serve the demo's conversation."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from vllm_kda_prefill.bench.command import app as bench_app
from vllm_kda_prefill.layout_command import layout as layout_command

if TYPE_CHECKING:
    from vllm_kda_prefill.planning import Layout

T = TypeVar("T")
CHUNK = 16
MAX_PROMPT = 262_143

# What typer raises for an option that is missing, unknown or of the wrong type.
USAGE_ERROR: Any = typer.BadParameter.__bases__[0]

app = typer.Typer(
    help="Coalesced KDA prefill with retained checkpoints, on vLLM's real scheduler; no GPU needed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class PolicyName(StrEnum):
    """Which states of a prompt are retained."""

    LADDER = "ladder"
    REPLAY = "replay"


Dcp = Annotated[int, typer.Option(help="Decode context parallel ranks: 1, 2, 4 or 8.")]
Mtp = Annotated[int, typer.Option(help="Draft tokens of multi-token prediction, 0 to 8.")]
Policy = Annotated[PolicyName, typer.Option(help="Which states of a prompt are retained.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show vLLM's log.")]


def main() -> None:
    """Entry point. Exit status 2, and one line on stderr, for a value that cannot be used."""
    try:
        status = app(standalone_mode=False)
    except USAGE_ERROR as error:
        message = " ".join(error.format_message().split()).rstrip(".")
        if message:
            print(f"error: {message}{_given(error.__cause__, message)}; see kda-prefill --help", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
    sys.exit(status or 0)


def _given(cause: BaseException | None, message: str) -> str:
    """The value that typer's type check refused, where its message does not name it."""
    from pydantic import ValidationError

    if not isinstance(cause, ValidationError):
        return ""
    value = repr(cause.errors()[0]["input"])
    return "" if value in message else f", not {value}"


@app.command()
def plan(
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 8192,
    dcp: Dcp = 1,
    mtp: Mtp = 3,
    block_size: Annotated[int, typer.Option(help="Tokens of an attention page on one rank.")] = 512,
    mamba_block_size: Annotated[int, typer.Option(help="Tokens of a recurrent page.")] = 512,
    budget: Annotated[int, typer.Option(help="Tokens of one step.")] = 8192,
    policy: Policy = PolicyName.LADDER,
    cached: Annotated[int, typer.Option(help="Tokens of the prompt that are in the prefix cache.")] = 0,
    model: Annotated[
        Path | None, typer.Option(help="Folder of a config.json; default the GLM-5.3-Flash shapes.")
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Ask vLLM's scheduler and KV cache manager what they do with one prompt, coalesced and stock."""
    check("--prompt", prompt, 1 <= prompt <= MAX_PROMPT, f"give 1 to {MAX_PROMPT} tokens")
    check_engine(dcp, mtp)
    check("--block-size", block_size, is_chunked(block_size), f"give a positive multiple of {CHUNK} tokens")
    check(
        "--mamba-block-size",
        mamba_block_size,
        is_chunked(mamba_block_size) and mamba_block_size % block_size == 0,
        f"give a multiple of --block-size, {block_size} tokens",
    )
    check("--budget", budget, budget > mtp, f"give at least {mtp + 1} tokens, one more than --mtp")
    check("--cached", cached, 0 <= cached < prompt, f"give 0 to {prompt - 1} tokens, less than --prompt")
    if model is not None:
        check_model(model, mtp)

    def layout() -> Layout:
        from vllm_kda_prefill.planning import Layout

        return Layout(
            attention_block=block_size,
            mamba_block=mamba_block_size,
            dcp=dcp,
            mtp=mtp,
            budget=budget,
            num_pages=2 * MAX_PROMPT // min(block_size, mamba_block_size) + 1000,
            max_seqs=1,
            model=model,
        )

    def run() -> Any:
        from vllm_kda_prefill.plan_report import UnreachableHitError, make_report

        try:
            return make_report(layout(), policy.value, prompt, cached)
        except UnreachableHitError as error:
            fail(f"--cached: {error}")

    report = quietly(run, verbose)
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        from vllm_kda_prefill.tables import print_plan

        print_plan(report)


app.command("layout")(layout_command)
app.add_typer(bench_app, name="bench")


@app.command()
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
        check("--plot", plot, plot.suffix in (".png", ".svg", ".pdf"), "name a .png, .svg or .pdf file")
        check("--plot", plot, plot.absolute().parent.is_dir(), "make its folder first")
        check("--plot", plot, os.access(plot.absolute().parent, os.W_OK), "choose a folder you can write to")
        check("--plot", plot, not plot.is_dir(), "it is a folder; name a file")
        check("--plot", plot, not plot.exists() or os.access(plot, os.W_OK), "the file cannot be written over")

    from vllm_kda_prefill.tables import print_demo, progress

    with progress() as bar:
        task = bar.add_task("starting vLLM", total=None)

        def run() -> Any:
            from vllm_kda_prefill.conversation import Conversation
            from vllm_kda_prefill.planning import Layout

            conversation = Conversation(Layout(dcp=dcp, mtp=mtp, num_pages=400), policy.value)
            bar.update(task, total=conversation.steps)
            for arm, record in conversation.play():
                bar.update(task, advance=1, description=f"{record.turn.name} ({arm})")
            return conversation

        conversation = quietly(run, verbose)
    if plot is not None:
        from vllm_kda_prefill.timeline import draw

        draw(conversation, plot)
    if as_json:
        print(json.dumps(conversation.as_json()))
    else:
        print_demo(conversation, plot)
    if not conversation.all_equal:
        raise typer.Exit(1)


def check_engine(dcp: int, mtp: int) -> None:
    check("--dcp", dcp, dcp in (1, 2, 4, 8), "give 1, 2, 4 or 8 ranks")
    check("--mtp", mtp, 0 <= mtp <= 8, "give 0 to 8 draft tokens")


def check_model(folder: Path, mtp: int) -> None:
    """The folder must hold the config.json of a GLM5Next model, with a draft layer if drafts are asked for."""
    path = folder / "config.json"
    check("--model", folder, path.is_file(), "name a folder with a config.json in it")
    try:
        config = json.loads(path.read_text())
        (architecture,) = config["architectures"]
        check(
            "--model",
            folder,
            architecture.startswith("Glm5Next"),
            f"{architecture} has no KDA layers; use a GLM5Next model",
        )
        check("--model", folder, bool(config.get("model_type")), "its config.json has no model_type; add it")
        layers = int(config.get("text_config", config).get("num_nextn_predict_layers", 0))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        fail(f"--model {folder}: its config.json is not one of a GLM5Next model ({error}); give one that is")
    check("--mtp", mtp, mtp == 0 or layers > 0, f"{path} has no num_nextn_predict_layers; give --mtp 0")


def is_chunked(tokens: int) -> bool:
    return tokens > 0 and tokens % CHUNK == 0


def check(option: str, value: object, is_good: bool, way_out: str) -> None:
    if not is_good:
        fail(f"{option} {value}: {way_out}")


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(2)


def quietly(action: Callable[[], T], verbose: bool) -> T:
    """Run something that imports vLLM, with its log shown or not."""
    if not verbose:
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        logging.disable(logging.WARNING)
    try:
        return action()
    except (ValueError, NotImplementedError) as error:
        if verbose:
            raise
        lines = [line.strip() for line in str(error).splitlines()]
        fail(f"vLLM refuses this layout: {' '.join(lines)[:400]} (--verbose shows where)")
