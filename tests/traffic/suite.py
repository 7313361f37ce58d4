# SPDX-License-Identifier: Apache-2.0
"""How much traffic the test suite runs; a planted fault has to be found within the same."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.traffic.machine import CrowdedTraffic, CrowdedWideTraffic, FineTraffic, Traffic, WideTraffic

SEED = 0
EXAMPLES: dict[type[Traffic], int] = {
    WideTraffic: 15,
    FineTraffic: 10,
    CrowdedTraffic: 20,
    CrowdedWideTraffic: 12,
    Traffic: 18,
}


def run(machine: type[Traffic], examples: int, first_seed: int = SEED, steps: int = 30) -> None:
    """Run `examples` engines of at most `steps` rules each.

    Raises:
        AssertionError: Something wrong was kept, read or sampled, or a block was lost.
    """
    budget = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(first_seed)(machine), settings=budget)
