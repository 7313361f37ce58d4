# SPDX-License-Identifier: Apache-2.0
"""Hostile traffic with random seeds for as long as wanted: `MINUTES=30 python -m tests.traffic.soak`.

Prints a line a round, about every ten seconds, with the totals so far; on a failure the seed, the failure and the
smallest case that still fails.
"""

from __future__ import annotations

import logging
import math
import os
import random
import sys
import time
from collections import Counter

import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.traffic.machine import MACHINES

ROUND = settings(
    # About ten seconds on a shared core.
    max_examples=6,
    stateful_step_count=30,
    deadline=None,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    report_multiple_bugs=False,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)


def main() -> int:
    """Run rounds until MINUTES are over. SEED fixes the first round's seed.

    Returns:
        1 after a failure, 2 for a setting that cannot be, else 0.
    """
    try:
        minutes = float(os.environ.get("MINUTES", "10"))
        first = int(os.environ.get("SEED", random.SystemRandom().randrange(10**6)))
    except ValueError as error:
        print(f"error: MINUTES and SEED must be numbers: {error}", file=sys.stderr)
        return 2
    if not 0 < minutes < math.inf:
        print(f"error: MINUTES={minutes:g} runs nothing or for ever; set it to more than 0", file=sys.stderr)
        return 2
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    began = time.monotonic()
    totals: Counter[str] = Counter()
    number = first
    while time.monotonic() - began < minutes * 60:
        machine = MACHINES[number % len(MACHINES)]
        machine.totals = totals
        print(f"seed {number} ({machine.__name__})", end=" ", flush=True)
        try:
            run_state_machine_as_test(seed(number)(machine), settings=ROUND)
        except Exception as error:
            print(f"FAILED: {type(error).__name__}: {error}")
            print("\n".join(getattr(error, "__notes__", ())))
            print(f"until then: {summary(totals)}")
            print(f"again: SEED={number} MINUTES=0.01 python -m tests.traffic.soak", flush=True)
            return 1
        print(f"ok, {(time.monotonic() - began) / 60:.1f} of {minutes:g} minutes; {summary(totals)}", flush=True)
        number += 1
    print(f"no failure: {summary(totals)}")
    return 0


def summary(totals: Counter[str]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in sorted(totals.items()))


if __name__ == "__main__":
    sys.exit(main())
