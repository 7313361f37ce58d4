# SPDX-License-Identifier: Apache-2.0
"""When requests come."""

from __future__ import annotations

from tests.trace.by_hand import make_trace
from vllm_kda_prefill.trace.arrivals import AtOnce, Recorded


def test_one_comes_when_one_finishes():
    assert AtOnce().come(sent=0, running=0) == 1
    assert AtOnce().come(sent=1, running=1) == 1
    assert AtOnce(8).come(sent=20, running=5) == 23


def recorded(speed: float) -> Recorded:
    prompts = make_trace(*[(512, [block]) for block in range(4)], times=[0, 1, 2, 10]).prompts
    return Recorded(prompts, speed, tokens_per_second=1000)


def test_recorded_times_on_a_clock_of_steps():
    clock = recorded(speed=1)
    assert clock.come(sent=0, running=0) == 1
    clock.note_step(999)
    assert clock.come(sent=1, running=1) == 1
    clock.note_step(1)
    assert clock.come(sent=1, running=1) == 2
    clock.note_step(5000)
    assert clock.come(sent=2, running=2) == 3
    # The server is idle at 6 seconds: its clock goes on to 10.
    assert clock.come(sent=3, running=0) == 4
    assert clock.seconds == 10
    assert clock.come(sent=4, running=0) == 4


def test_twice_as_fast():
    clock = recorded(speed=2)
    clock.note_step(1000)
    assert clock.come(sent=0, running=0) == 3
