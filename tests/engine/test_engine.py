# SPDX-License-Identifier: Apache-2.0
"""The real engine with GLM-5.3-Flash layer shapes and random weights, gate on against gate off.

Stock itself does not repeat its logprobs to the last bit (sparse attention adds up its selected tokens in no fixed
order), so each comparison is held against what stock differs from itself: for cold prompts another stock engine, one
with stock's other KDA kernel and one in chunks of 512 tokens (states are rounded where a query ends, as where one is
exported); for hits stock's own.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.engine.arms import Arm, Runs, generate, prompt
from tests.engine.branches import (
    BRANCHES,
    MARGIN,
    STOCK_BRANCHES,
    Run,
    at_most_one_state,
    branch_steps,
    check_fault,
    check_hits,
    check_identical,
    differences,
    fault_steps,
)
from tests.engine.compare import difference, rounded

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

LENGTHS: tuple[int, ...] = (1, 2, 15, 16, 17, 100, 511, 512, 513, 514, 1023, 1024, 1025, 2048, 3000, 4095, 4096)
LENGTHS += (4608, 8191, 8192, 8193, 9000, 16384, 32768)
HITS = [7680, 7168, 6144, 4096]
CAPTURE = (4, 8, 16, 32, 64, 128, 512, 1024, 2048)
"""Batches with CUDA graphs: decoding, and passes short enough to end a hit, with states inside and padded ones too."""


COLD = [generate(prompt(length, 1000 + length), 64, 200) for length in LENGTHS]


def steps(branches: tuple[int, ...]) -> list[dict[str, Any]]:
    return [*COLD, *branch_steps(branches)]


ARMS: dict[str, tuple[Arm, list[dict[str, Any]]]] = {
    "stock": (Arm(False), steps(STOCK_BRANCHES)),
    "stock again": (Arm(False, label="again"), steps(BRANCHES)),
    "stock triton": (Arm(False, backend="triton"), COLD),
    "stock in chunks": (Arm(False, budget=1024, label="chunks"), COLD),
    "flashkda": (Arm(True, backend="flashkda"), steps(BRANCHES)),
    "native": (Arm(True, backend="native"), [*steps(BRANCHES), *fault_steps(7168, 7400)]),
    "graphs": (Arm(True, eager=False, capture=CAPTURE), steps(BRANCHES)),
    "stock graphs": (Arm(False, eager=False, capture=CAPTURE), steps(STOCK_BRANCHES)),
    "no mtp": (Arm(True, mtp=0), steps(BRANCHES)),
    "stock no mtp": (Arm(False, mtp=0), steps(STOCK_BRANCHES)),
}
COALESCED = {"flashkda": "stock", "native": "stock", "graphs": "stock graphs", "no mtp": "stock no mtp"}
"""Coalesced arms, and the stock arm each is compared with."""


ONE_STATE = at_most_one_state(LENGTHS)
REPEATABLE = [index for index, length in enumerate(LENGTHS) if length <= 2048]
"""Prompts short enough for stock's sparse attention to take every token: it repeats those to the last bit."""


LONG = [index for index, length in enumerate(LENGTHS) if length > 2048]


def run(answers: list[Any]) -> Run:
    return Run(answers, len(COLD))


def cold(answers: list[Any]) -> list[Any]:
    """An arm's answers to the cold prompts, which it begins with."""
    return answers[: len(COLD)]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(ARMS, tmp_path_factory.mktemp("engine"))


@pytest.fixture
def stock(runs):
    return run(runs.answers("stock"))


@pytest.fixture
def stock_again(runs):
    return run(runs.answers("stock again"))


def own_differences(runs: Any, stock: Run) -> dict[str, list[float]]:
    """How far stock's cold answers are from those of stock engines that ought to give the same."""
    others = ("stock again", "stock triton", "stock in chunks")
    return {name: differences(stock.cold, cold(runs.answers(name))) for name in others}


@pytest.fixture
def stocks_own(runs, stock):
    return own_differences(runs, stock)


def test_the_random_model_depends_on_its_prompt(stock):
    tokens = {tuple(answer["tokens"]) for answer in stock.cold}
    assert len(tokens) > len(LENGTHS) * 0.9
    # Logprobs of a flat distribution over 32,000 tokens are all near -10.4.
    assert max(next(iter(answer["logprobs"][0].values())) for answer in stock.cold) > -9.0


def test_stock_repeats_itself_where_attention_takes_every_token(stock, stock_again):
    found = differences(stock.cold, stock_again.cold)
    assert [found[index] for index in REPEATABLE] == [0.0] * len(REPEATABLE)


@pytest.mark.parametrize("arm", COALESCED)
def test_cold_prompts_differ_no_more_than_stock_from_itself(arm, runs, stocks_own):
    ours = run(runs.answers(arm))
    found = differences(cold(runs.answers(COALESCED[arm])), ours.cold)
    print(f"\n{arm}, cold, against stock {rounded(found)}")
    for name, own in stocks_own.items():
        print(f"  {name}, against stock {rounded(own)}")
    assert [answer["cached"] for answer in ours.cold] == [0] * len(LENGTHS)
    # Both are the worst of dozens of draws. Short prompts have their own limit: there stock differs by
    # its kernel and its chunks alone.
    for lengths in (REPEATABLE, LONG):
        limit = MARGIN * max(own[index] for own in stocks_own.values() for index in lengths)
        assert max(found[index] for index in lengths) <= limit


def test_answers_to_other_prompts_are_farther_off_than_that(stock, stocks_own):
    limit = MARGIN * max(max(own) for own in stocks_own.values())
    apart = [difference(a, b) for a, b in itertools.combinations(stock.cold, 2)]
    assert min(apart) > limit


def test_flashkda_with_one_export_is_stock_to_the_last_bit(runs, stock):
    ours = run(runs.answers("flashkda"))
    check_identical([ours.cold[index] for index in ONE_STATE], [stock.cold[index] for index in ONE_STATE])


@pytest.mark.parametrize("arm", COALESCED)
def test_branches_hit_the_state_below_them(arm, runs):
    ours = run(runs.answers(arm))
    assert [answer["cached"] for answer in ours.hits] == HITS
    assert [answer["cached"] for answer in ours.uncached] == [0] * len(BRANCHES)


def test_stock_hits_its_one_state_only(stock, stock_again):
    assert [answer["cached"] for answer in stock.hits] == [7680] * len(STOCK_BRANCHES)
    assert [answer["cached"] for answer in stock_again.hits] == [7680, 0, 0, 0]


@pytest.mark.parametrize("arm", COALESCED)
def test_a_hit_differs_no_more_than_stocks_hits_do(arm, runs):
    ours = run(runs.answers(arm))
    print(f"\n{arm}, hits: {check_hits(ours.hits, ours.uncached, run(runs.answers(COALESCED[arm])))}")


def test_a_planted_wrong_state_fails_the_test_above(runs, stock):
    print(f"\na zeroed state at 7,168: {check_fault(run(runs.answers('native')), 7168, stock)}")


@pytest.mark.parametrize("arm", COALESCED)
def test_the_planner_counted_its_exports(arm, runs):
    summary = run(runs.answers(arm)).summary
    assert summary["block_sizes"][:2] == [512, 512]
    assert not any(name.startswith("fallbacks") for name in summary["counts"])
    # Cold prompts, the base and the uncached branches export all they can; each branch what it computes.
    assert summary["counts"]["states"] >= 4 * (1 + len(BRANCHES))
    assert run(runs.answers(COALESCED[arm])).summary["counts"] is None
