"""The engine on two and four ranks, which share the GPU, with and without decode context parallelism.

Stock cannot merge the 128 rows that GLM-5.3-Flash's indexer selects on each rank, so here it selects 8,192 tokens: 512
rows. Prompts of up to that many tokens are then attended in whole. On Hopper DCP asks for fewer than 32 attention heads
a rank, so the model of two ranks has 32.
"""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.arms import Arm, Runs, generate, prompt
from tests.engine.branches import (
    BASE,
    BRANCHES,
    MARGIN,
    STOCK_BRANCHES,
    Run,
    branch,
    branch_steps,
    check_hits,
    differences,
)
from tests.engine.compare import LISTED, rounded

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
"""By ranks, the layout in which stock's two KDA kernels are compared; compiling the other takes it two minutes. There
FlashKDA exports too."""


def arms(ranks: int) -> dict[str, tuple[Arm, list[dict[str, Any]]]]:
    """All arms of so many ranks: the gate on, stock, and in one layout both with another KDA kernel."""
    fault = [generate(BASE, 1, 1), {"zero_state": 7680, "rank": ranks - 1}, generate(branch(7900), 8, LISTED)]
    made = {}
    for name, (tp, dcp, mtp) in LAYOUTS.items():
        if tp == ranks:
            stock = Arm(False, tp=tp, dcp=dcp, mtp=mtp)
            ours = [*COLD, *branch_steps(BRANCHES), {"reset": True}, *fault]
            made[name] = (replace(stock, gate=True), ours)
            made[f"stock {name}"] = (stock, [*COLD, *branch_steps(STOCK_BRANCHES)])
            if name in KERNELS.values():
                made[f"triton {name}"] = (replace(stock, backend="triton"), COLD)
                made[f"flashkda {name}"] = (replace(stock, gate=True, backend="flashkda"), COLD)
    return made


@pytest.fixture(scope="session")
def all_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Runs]:
    return {
        ranks: Runs(arms(ranks), tmp_path_factory.mktemp(f"tp{ranks}"), at_once, heads=16 * ranks, topk=8192)
        # Four ranks take 55 GiB.
        for ranks, at_once in ((4, 2), (2, 3))
    }


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def runs(all_runs, layout):
    return all_runs[LAYOUTS[layout][0]]


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
def test_flashkda_with_at_most_one_export_is_stock_to_the_last_bit(ranks, all_runs):
    flashkda, stock = (all_runs[ranks].answers(f"{arm} {KERNELS[ranks]}") for arm in ("flashkda", "stock"))
    for index in ONE_STATE:
        assert flashkda[index]["tokens"] == stock[index]["tokens"]
        assert flashkda[index]["logprobs"] == stock[index]["logprobs"]


def test_branches_hit_the_state_below_them(layout, ours, stock):
    assert [answer["cached"] for answer in ours.hits] == HITS[LAYOUTS[layout][1]]
    assert [answer["cached"] for answer in ours.uncached] == [0] * len(BRANCHES)
    assert [answer["cached"] for answer in stock.hits] == [7680] * len(STOCK_BRANCHES)


def test_a_hit_differs_from_an_uncached_run_no_more_than_stocks_hits_do(layout, ours, stock):
    print(f"\n{layout}, hits: {check_hits(ours.hits, ours.uncached, stock)}")


def test_a_wrong_state_of_one_rank_fails_the_test_above(layout, ours, stock):
    _, zeroed, answer = ours.fault
    assert zeroed > 0
    assert answer["cached"] == 7680
    with pytest.raises(AssertionError) as failure:
        check_hits([answer], [ours.uncached[0]], stock)
    print(f"\n{layout}, the last rank's state at 7,680 zeroed: {failure.value}")


PLAN = r"request (\S+), query \[(\d+), \d+\), checkpoints (\[.*?\]), pages (\{.*\})"
ROWS = r"request (\S+) in row 0, query \[(\d+), \d+\), offsets (\[.*?\]), pages (\{.*\})"


def test_every_rank_exports_what_the_scheduler_planned(layout, runs, ours):
    log = runs.log(layout)
    planned = [
        (name, int(start), ast.literal_eval(positions), ast.literal_eval(pages))
        for name, start, positions, pages in re.findall(f"KDA prefill plan: {PLAN}", log)
    ]
    exported: dict[str, list[Any]] = {}
    for rank, name, start, offsets, slots in re.findall(rf"\((Worker\S*) .*KDA prefill rows: {ROWS}", log):
        positions = [int(start) + offset for offset in ast.literal_eval(offsets)]
        pages = {group: tuple(columns) for group, columns in ast.literal_eval(slots).items()}
        exported.setdefault(rank, []).append((name, int(start), positions, pages))
    assert list(exported.values()) == [planned] * LAYOUTS[layout][0]
    counts = ours.summary["counts"]
    # All are logged: those of the summary, and behind it the base's once more.
    assert counts["states"] == sum(len(positions) for _, _, positions, _ in planned[:-1])
    assert len(planned) < Arm.log_limit
    assert not any(name.startswith("fallbacks") for name in counts)
