# SPDX-License-Identifier: Apache-2.0
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
from tests.engine.compare import rounded
from tests.engine.glm import mergeable
from tests.engine.plan_lines import exported, planned

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1500)]

LENGTHS = (1, 17, 512, 1024, 1025, 2048, 4096, 8192, 9000, 16384, 32768)
COLD = [generate(prompt(length, 1000 + length), 16, 200) for length in LENGTHS]

ONE_STATE = at_most_one_state(LENGTHS)

LAYOUTS = {
    "tp2": Arm(False, tp=2),
    "tp2 dcp2": Arm(False, tp=2, dcp=2),
    "tp2 dcp2 no mtp": Arm(False, tp=2, dcp=2, mtp=0),
    "tp4": Arm(False, tp=4, cache_gib=1),
    "tp4 dcp2": Arm(False, tp=4, dcp=2, cache_gib=1),
    "tp4 dcp4": Arm(False, tp=4, dcp=4, cache_gib=1),
    "tp4 dcp4 no mtp": Arm(False, tp=4, dcp=4, mtp=0, cache_gib=1),
}
"""Each with stock's arm in it. Two engines of four ranks fit on the GPU if their caches are no larger."""
HITS = {1: [7680, 7168, 6144, 4096], 2: [7680, 7168, 6144, 4096], 4: [7680, 7168, 6144, 4096]}
"""By DCP, the deepest state below each branch that attention reaches too, in blocks of 512 tokens a rank."""

KERNELS = {2: "tp2 dcp2", 4: "tp4 dcp4"}
"""By ranks, the layout in which stock's two KDA kernels are compared (compiling the other takes it two minutes) and
FlashKDA exports too. Stock answers the prompts of ONE_STATE twice there."""


def arms(ranks: int) -> dict[str, tuple[Arm, list[dict[str, Any]]]]:
    """All arms of so many ranks: the gate on, stock, and in one layout both with another KDA kernel."""
    short = [COLD[index] for index in ONE_STATE]
    made = {}
    for name, stock in LAYOUTS.items():
        if stock.tp == ranks:
            ours = [*COLD, *branch_steps(BRANCHES), *fault_steps(7680, 7900, rank=ranks - 1)]
            made[name] = (replace(stock, gate=True), ours)
            again = [{"reset": True}, *short] if name == KERNELS[ranks] else []
            made[f"stock {name}"] = (stock, [*COLD, *branch_steps(STOCK_BRANCHES), *again])
            if name == KERNELS[ranks]:
                made[f"triton {name}"] = (replace(stock, backend="triton"), COLD)
                made[f"flashkda {name}"] = (replace(stock, gate=True, backend="flashkda"), short)
    return made


def run(runs: Runs, arm: str) -> Run:
    return Run(runs.answers(arm), len(COLD))


@pytest.fixture(scope="session")
def runs_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Runs]:
    """The engines of so many ranks, started by the first test that asks for them."""

    @functools.cache
    def start(ranks: int) -> Runs:
        return Runs(arms(ranks), tmp_path_factory.mktemp(f"tp{ranks}"), at_once=3, **mergeable(ranks))

    return start


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def runs(runs_of, layout):
    return runs_of(LAYOUTS[layout].tp)


@pytest.fixture
def ours(layout, runs):
    return run(runs, layout)


@pytest.fixture
def stock(layout, runs):
    return run(runs, f"stock {layout}")


def test_cold_prompts_differ_no_more_than_stocks_kernels_do(layout, runs, ours, stock):
    found = differences(ours.cold, stock.cold)
    kernels = KERNELS[LAYOUTS[layout].tp]
    own = differences(runs.answers(f"triton {kernels}"), run(runs, f"stock {kernels}").cold)
    print(f"\n{layout}, cold, against stock {rounded(found)}; stock's kernels {rounded(own)}")
    assert max(found) <= MARGIN * max(own)


@pytest.mark.parametrize("ranks", KERNELS)
def test_flashkda_with_one_export_is_stock_to_the_last_bit(ranks, runs_of):
    runs, layout = runs_of(ranks), KERNELS[ranks]
    stock = run(runs, f"stock {layout}")
    check_identical(stock.rest, [stock.cold[index] for index in ONE_STATE])  # Else the next would say nothing.
    check_identical(runs.answers(f"flashkda {layout}"), stock.rest)
    assert [positions for *_, positions, _ in planned(runs.log(f"flashkda {layout}"))] == [[512]]


def test_branches_hit_the_state_below_them(layout, ours, stock):
    assert [answer["cached"] for answer in ours.hits] == HITS[LAYOUTS[layout].dcp]
    assert [answer["cached"] for answer in ours.uncached] == [0] * len(BRANCHES)
    assert [answer["cached"] for answer in stock.hits] == [7680] * len(STOCK_BRANCHES)


def test_a_hit_differs_no_more_than_stocks_hits_do(layout, ours, stock):
    print(f"\n{layout}, hits: {check_hits(ours.hits, ours.uncached, stock)}")


def test_a_wrong_state_of_one_rank_fails_the_test_above(layout, ours, stock):
    print(f"\n{layout}, the last rank's state at 7,680 zeroed: {check_fault(ours, 7680, stock)}")


def test_every_rank_exports_what_the_scheduler_planned(layout, runs, ours):
    plans = planned(runs.log(layout))
    assert list(exported(runs.log(layout)).values()) == [plans] * LAYOUTS[layout].tp
    counts = ours.summary["counts"]
    # All are logged: those of the summary, and behind it the base's once more.
    assert counts["states"] == sum(len(positions) for *_, positions, _ in plans[:-1])
    assert len(plans) < Arm.log_limit
    assert not any(name.startswith("fallbacks") for name in counts)
