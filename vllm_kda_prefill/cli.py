# SPDX-License-Identifier: Apache-2.0
"""The `kda-prefill` command: its subcommands, its version, and one line for a value that cannot be used."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from vllm_kda_prefill.bench.command import app as bench_app
from vllm_kda_prefill.demo.command import demo
from vllm_kda_prefill.doctor.command import doctor
from vllm_kda_prefill.layout.command import layout
from vllm_kda_prefill.plan.command import plan

# What typer raises for an option that is missing, unknown or of the wrong type.
USAGE_ERROR: Any = typer.BadParameter.__bases__[0]

app = typer.Typer(
    help="Coalesced KDA prefill with retained checkpoints, on vLLM's real scheduler; no GPU needed.",
    epilog="Exit status: 0 done; 1 a wrong answer or a measurement that cannot be believed; 2 a value that cannot be "
    "used; 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("plan")(plan)
app.command("layout")(layout)
app.command("doctor")(doctor)
app.command("demo")(demo)
app.add_typer(bench_app, name="bench")


def show_version(is_asked: bool) -> None:
    if is_asked:
        from vllm_kda_prefill.versions import versions

        print("\n".join(f"{name} {version}" for name, version in versions().items()))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=show_version,
            is_eager=True,
            help="Show this fork's version, vLLM's, and how the native kernel gets built.",
        ),
    ] = False,
) -> None:
    """Options of the command itself."""


def main() -> None:
    """Entry point. Exit status 2, and one line on stderr, for a value that cannot be used."""
    try:
        status = app(standalone_mode=False)
    except USAGE_ERROR as error:
        message = usage_message(error)
        if message:
            print(f"error: {message}; see {command_of(error)} --help", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
    sys.exit(status or 0)


def command_of(error: Any) -> str:
    """The command that a usage error is about; the parser's own errors do not say, so then the one that was named."""
    context = getattr(error, "ctx", None)
    if context:
        return str(context.command_path)
    named, command = ["kda-prefill"], typer.main.get_command(app)
    for argument in sys.argv[1:]:
        inner = getattr(command, "commands", {}).get(argument)
        if inner is None:
            break
        named.append(argument)
        command = inner
    return " ".join(named)


KINDS = {"int_parsing": "a whole number", "int_from_float": "a whole number", "float_parsing": "a number"}
BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def usage_message(error: Any) -> str:
    """One line for a usage error, with the value that typer's type check refused and what would be right."""
    from pydantic import ValidationError

    message = " ".join(error.format_message().split()).rstrip(".").removeprefix("Invalid value: ")
    cause, parameter = error.__cause__, getattr(error, "param", None)
    if not isinstance(cause, ValidationError) or parameter is None:
        return message
    (found, *_) = cause.errors()
    limits = [f"{word} {found['ctx'][key]}" for key, word in BOUNDS.items() if key in found.get("ctx", {})]
    _, _, choices = found["msg"].partition("is not one of ")
    hint = KINDS.get(found["type"]) or " and ".join(limits) or (choices and f"one of {choices.rstrip('.')}")
    return f"{parameter.opts[0]} {found['input']}: give {hint}" if hint else message
