# SPDX-License-Identifier: Apache-2.0
"""What all commands share: options, checks of their values, and the start of vLLM."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from vllm_kda_prefill.model_config import model_problem
from vllm_kda_prefill.refusals import refusal

T = TypeVar("T")

ALIGNMENT = 16
"""vLLM's block sizes are multiples of this many tokens where a checkpoint can be inside one."""

MAX_PROMPT = 262_143

OLD_FLAGS = {"--page": "block", "--pages": "blocks"}
OLD_NAMES = {"token_normalize_func": lambda name: OLD_FLAGS.get(f"--{name}", name)}
"""Context settings of a command that also answers to the names its options had before."""


class PolicyName(StrEnum):
    """Which states of a prompt are retained."""

    LADDER = "ladder"
    REPLAY = "replay"


Dcp = Annotated[int, typer.Option(help="Decode context parallel ranks: 1, 2, 4 or 8.")]
Mtp = Annotated[int, typer.Option(help="Draft tokens of multi-token prediction, 0 to 8.")]
Policy = Annotated[PolicyName, typer.Option(help="Which states of a prompt are retained.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show vLLM's log.")]


def fail(message: str) -> NoReturn:
    """End the command with one line on stderr and exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(2)


def check(option: str, value: object, is_good: bool, hint: str) -> None:
    """End the command unless an option's value is good; the line names both and says what to give."""
    if not is_good:
        fail(f"{option} {value}: {hint}")


def check_engine(dcp: int, mtp: int) -> None:
    check("--dcp", dcp, dcp in (1, 2, 4, 8), "give 1, 2, 4 or 8 ranks")
    check("--mtp", mtp, 0 <= mtp <= 8, "give 0 to 8 draft tokens")


def check_block(option: str, tokens: int) -> None:
    """End the command unless a block size is one that vLLM can have."""
    is_good = tokens > 0 and tokens % ALIGNMENT == 0
    check(option, tokens, is_good, f"give a positive multiple of {ALIGNMENT} tokens")


def check_model(folder: Path | None, mtp: int, glm_only: bool = True) -> None:
    """End the command unless `--model` can be planned with, and has draft layers if `--mtp` asks for drafts."""
    problem = model_problem(folder, mtp, glm_only)
    if problem:
        fail(problem)


def quietly(
    action: Callable[[], T], verbose: bool, spinner: bool = True, given: Mapping[str, object] | None = None
) -> T:
    """Import vLLM, which takes seconds, and run something on it.

    Args:
        action: What to run.
        verbose: Show vLLM's log, and where an error comes from.
        spinner: Turn a spinner on stderr meanwhile, where that is a terminal.
        given: Option -> value, of those that vLLM checks.

    Returns:
        What `action` returns. A layout that vLLM refuses ends the command with one line and exit status 2.
    """
    if not verbose:
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        logging.disable(logging.WARNING)
    try:
        with _spinner() if spinner and not verbose else nullcontext():
            with quick_imports():
                import vllm_kda_prefill.planning  # noqa: F401
            return action()
    except (ValueError, NotImplementedError) as error:
        if verbose:
            raise
        fail(f"{refusal(error, given or {})} (--verbose shows where)")


def _spinner() -> Any:
    from rich.console import Console

    # Rich shows none where stderr is no terminal.
    return Console(stderr=True).status("asking vLLM's scheduler")


@contextmanager
def quick_imports() -> Iterator[None]:
    """Save a third of the time that the imports of vLLM take.

    What an import makes stays, so collecting garbage meanwhile finds next to nothing. And transformers reads the file
    list of every installed package, to find names whose versions nothing here asks for.
    """
    import gc
    import importlib.metadata

    name_distributions, was_enabled = importlib.metadata.packages_distributions, gc.isenabled()
    importlib.metadata.packages_distributions = dict
    gc.disable()
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = name_distributions
        # Modules stay to the end: no later collection needs to look through them.
        gc.freeze()
        if was_enabled:
            gc.enable()
