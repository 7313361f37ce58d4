# SPDX-License-Identifier: Apache-2.0
"""Branches off one prompt: what an arm is sent, what it answered, and how far a hit may be from an uncached run.

And what a planted wrong state must do to that."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.arms import generate, prompt
from tests.engine.compare import LISTED, difference, rounded

BASE = prompt(8192, 1)
BRANCHES = (7900, 7400, 6500, 5000)
STOCK_BRANCHES = (7700, 7800, 7900, 8000)
KDA_LAYERS = 6
"""Of the model with 8 layers; each is a group of its own, with a block a state."""
MARGIN = 1.5
"""How many times stock's own cold differences an arm's may be."""


def branch(at: int) -> list[int]:
    """A prompt of 8,192 tokens that leaves BASE at `at`."""
    return BASE[:at] + prompt(8192 - at, at)


def branch_steps(branches: tuple[int, ...]) -> list[dict[str, Any]]:
    """In an emptied cache, branches after their base; the same branches uncached; the summary."""
    hits = [generate(branch(at), 8, LISTED) for at in branches]
    uncached = [step for at in branches for step in ({"reset": True}, generate(branch(at), 8, LISTED))]
    return [{"reset": True}, generate(BASE, 8, 1), *hits, *uncached, {"summary": True}]


def fault_steps(state: int, at: int, rank: int | None = None) -> list[dict[str, Any]]:
    """In an emptied cache, a branch that hits a wrong state: the base's, zeroed (on one rank only)."""
    fault = {"zero_state": state, "rank": rank}
    return [{"reset": True}, generate(BASE, 1, 1), fault, generate(branch(at), 8, 20)]


def at_most_one_state(lengths: tuple[int, ...]) -> list[int]:
    """Indices of prompts of which at most one state is kept inside a span, as stock keeps it."""
    return [index for index, length in enumerate(lengths) if length <= 1024]


class Run:
    """What an arm answered to `num_cold` cold prompts, the steps of four branches, and behind a reset the `rest`."""

    def __init__(self, answers: list[Any], num_cold: int) -> None:
        end = num_cold + len(branch_steps(BRANCHES))
        self.cold, warm = answers[:num_cold], answers[num_cold + 2 : end - 1]
        self.summary, self.rest = answers[end - 1], answers[end + 1 :]
        self.hits, self.uncached = warm[: len(BRANCHES)], warm[len(BRANCHES) + 1 :: 2]


def differences(left: list[Any], right: list[Any]) -> list[float]:
    return [difference(a, b) for a, b in zip(left, right, strict=True)]


def check_hits(hits: list[Any], uncached: list[Any], stock: Run) -> str:
    """Hold answers after hits against the same prompts uncached, as far as stock's own hits are from theirs.

    Returns:
        What was found, for the report.
    """
    own, found = differences(stock.hits, stock.uncached), differences(hits, uncached)
    report = f"differences {rounded(found)}, stock's {rounded(own)}"
    # Two times: both are the worst of four draws.
    assert max(found) <= 2 * max(own), report
    return report


def check_fault(run: Run, state: int, stock: Run) -> str:
    """Hold that the answers to `fault_steps` fail `check_hits`.

    Returns:
        How they do, for the report.
    """
    _, zeroed, answer = run.rest
    assert zeroed == KDA_LAYERS
    assert answer["cached"] == state
    uncached = next(other for other, hit in zip(run.uncached, run.hits, strict=True) if hit["cached"] == state)
    with pytest.raises(AssertionError) as failure:
        check_hits([answer], [uncached], stock)
    return str(failure.value)


def check_identical(left: list[Any], right: list[Any]) -> None:
    """Hold that answers are the same to the last bit."""
    for a, b in zip(left, right, strict=True):
        assert a["tokens"] == b["tokens"]
        assert a["logprobs"] == b["logprobs"]
