# SPDX-License-Identifier: Apache-2.0
"""Faults planted one at a time, each of which the suite must find: `python -m tests.traffic.mutants`.

A suite that finds nothing proves nothing unless it finds these, with the seed and the examples that `make test` runs.
Prints a table; exit status 1 if one survives.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.traffic.faults import MUTANTS, Plant
from tests.traffic.scenes import SCENES
from tests.traffic.suite import EXAMPLES, run
from vllm.v1.core.prefill_plan import PlanMismatchError


def find(plant: Plant) -> str | None:
    """How the suite notices a planted fault, or None if it does not. Anything but a failed check is an error of the
    plant's own."""
    with ExitStack() as stack:
        stack.enter_context(plant())
        checks: list[Callable[[], None]] = [*SCENES]
        checks += [partial(run, machine, examples) for machine, examples in EXAMPLES.items()]
        for check in checks:
            try:
                check()
            except (AssertionError, PlanMismatchError) as error:
                return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None


def main(names: list[str]) -> int:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for scene in SCENES:
        scene()
    table = Table("planted fault", "found by", "seconds")
    survivors = 0
    for name in names or MUTANTS:
        began = time.monotonic()
        found = find(MUTANTS[name])
        survivors += found is None
        shown = "[red]NOTHING[/]" if found is None else escape(found[:110])
        table.add_row(name, shown, f"{time.monotonic() - began:.0f}")
        print(f"{name}: {found}", file=sys.stderr)
    Console(width=160).print(table)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
