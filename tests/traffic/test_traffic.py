"""Hostile traffic with the gate on, for a fixed seed."""

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.traffic.machine import Traffic

BUDGET = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_nothing_wrong_is_ever_served():
    run_state_machine_as_test(Traffic, settings=BUDGET)
