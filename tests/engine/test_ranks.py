"""The engine on two and four ranks, which share the GPU, with and without decode context parallelism.

Stock cannot merge the 128 rows that GLM-5.3-Flash's indexer selects on each rank, so here it selects 8,192 tokens: 512
rows. Prompts of up to that many tokens are then attended in whole. On Hopper DCP asks for fewer than 32 attention heads
a rank, so the model of two ranks has 32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.arms import Arm, Runs, generate, prompt
from tests.engine.branches import (
    BASE,
    BRANCHES,
    KDA_LAYERS,
    MARGIN,
    STOCK_BRANCHES,
    Run,
    branch,
    branch_steps,
    check_hits,
    differences,
)
from tests.engine.compare import LISTED, rounded
from tests.engine.plan_lines import exported, planned

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1500)]

LENGTHS = (1, 17, 512, 1024, 1025, 2048, 4096, 8192, 9000, 16384, 32768)
COLD = [generate(prompt(length, 1000 + length), 16, 200) for length in LENGTHS]

ONE_STATE = [index for index, length in enumerate(LENGTHS) if length <= 1024]
"""Prompts of which at most one state is kept inside a span, as stock keeps it."""

LAYOUTS = {
    "tp2": (2, 1, 3),
    "tp2 dcp2": (2, 2, 3),
    "tp2 dcp2 no mtp": (2, 2, 0),
    "tp4": (4, 1, 3),
    "tp4 dcp2": (4, 2, 3),
    "tp4 dcp4": (4, 4, 3),
    "tp4 dcp4 no mtp": (4, 4, 0),
}
"""Ranks, how many of them share a sequence's attention cache, and draft tokens."""
HITS = {1: [7680, 7168, 6144, 4096], 2: [7680, 7168, 6144, 4096], 4: [7680, 6144, 6144, 4096]}
"""By DCP, the deepest state below each branch that attention reaches too, in blocks of 512 tokens a rank."""

KERNELS = {2: "tp2 dcp2", 4: "tp4 dcp4"}
"""By ranks, the layout in which stock's two KDA kernels are compared (compiling the other takes it two minutes) and
FlashKDA exports too. Stock answers the prompts of ONE_STATE twice there."""


def arms(ranks: int) -> dict[str, tuple[Arm, list[dict[str, Any]]]]:
    """All arms of so many ranks: the gate on, stock, and in one layout both with another KDA kernel."""
    fault = [generate(BASE, 1, 1), {"zero_state": 7680, "rank": ranks - 1}, generate(branch(7900), 8, LISTED)]
    short = [COLD[index] for index in ONE_STATE]
    made = {}
    for name, (tp, dcp, mtp) in LAYOUTS.items():
        if tp == ranks:
            stock = Arm(False, tp=tp, dcp=dcp, mtp=mtp)
            made[name] = (replace(stock, gate=True), [*COLD, *branch_steps(BRANCHES), {"reset": True}, *fault])
            made[f"stock {name}"] = (stock, [*COLD, *branch_steps(STOCK_BRANCHES)])
            if name == KERNELS[ranks]:
                made[f"stock {name}"][1].extend([{"reset": True}, *short])
                made[f"triton {name}"] = (replace(stock, backend="triton"), COLD)
                made[f"flashkda {name}"] = (replace(stock, gate=True, backend="flashkda"), short)
    return made


@pytest.fixture(scope="session")
def runs_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Runs]:
    """The engines of so many ranks, started by the first test that asks for them."""

    @functools.cache
    def start(ranks: int) -> Runs:
        return Runs(arms(ranks), tmp_path_factory.mktemp(f"tp{ranks}"), at_once=3, heads=16 * ranks, topk=8192)

    return start


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def runs(runs_of, layout):
    return runs_of(LAYOUTS[layout][0])


@pytest.fixture
def ours(layout, runs):
    return Run(runs.answers(layout), len(COLD))


@pytest.fixture
def stock(layout, runs):
    return Run(runs.answers(f"stock {layout}"), len(COLD))


def test_cold_prompts_differ_from_stock_no_more_than_its_kernels_do(layout, runs, ours, stock):
    found = differences(ours.cold, stock.cold)
    kernels = KERNELS[LAYOUTS[layout][0]]
    own = differences(runs.answers(f"triton {kernels}"), Run(runs.answers(f"stock {kernels}"), len(COLD)).cold)
    print(f"\n{layout}, cold, against stock {rounded(found)}; stock's kernels {rounded(own)}")
    assert max(found) <= MARGIN * max(own)


@pytest.mark.parametrize("ranks", KERNELS)
def test_flashkda_with_at_most_one_export_is_stock_to_the_last_bit(ranks, runs_of):
    runs, layout = runs_of(ranks), KERNELS[ranks]
    stock = Run(runs.answers(f"stock {layout}"), len(COLD))
    if differences(stock.fault, stock.cold[: len(ONE_STATE)]) != [0.0] * len(ONE_STATE):
        pytest.fail("stock does not repeat itself")
    for ours, theirs in zip(runs.answers(f"flashkda {layout}"), stock.fault, strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert ours["logprobs"] == theirs["logprobs"]
    assert [positions for *_, positions, _ in planned(runs.log(f"flashkda {layout}"))] == [[512]]


def test_branches_hit_the_state_below_them(layout, ours, stock):
    assert [answer["cached"] for answer in ours.hits] == HITS[LAYOUTS[layout][1]]
    assert [answer["cached"] for answer in ours.uncached] == [0] * len(BRANCHES)
    assert [answer["cached"] for answer in stock.hits] == [7680] * len(STOCK_BRANCHES)


def test_a_hit_differs_from_an_uncached_run_no_more_than_stocks_hits_do(layout, ours, stock):
    print(f"\n{layout}, hits: {check_hits(ours.hits, ours.uncached, stock)}")


def test_a_wrong_state_of_one_rank_fails_the_test_above(layout, ours, stock):
    _, zeroed, answer = ours.fault
    assert zeroed == KDA_LAYERS
    assert answer["cached"] == 7680
    with pytest.raises(AssertionError) as failure:
        check_hits([answer], [ours.uncached[0]], stock)
    print(f"\n{layout}, the last rank's state at 7,680 zeroed: {failure.value}")


def test_every_rank_exports_what_the_scheduler_planned(layout, runs, ours):
    plans = planned(runs.log(layout))
    assert list(exported(runs.log(layout)).values()) == [plans] * LAYOUTS[layout][0]
    counts = ours.summary["counts"]
    # All are logged: those of the summary, and behind it the base's once more.
    assert counts["states"] == sum(len(positions) for *_, positions, _ in plans[:-1])
    assert len(plans) < Arm.log_limit
    assert not any(name.startswith("fallbacks") for name in counts)
