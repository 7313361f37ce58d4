"""The engine on two and four ranks, which share the GPU, with and without decode context parallelism.

Stock cannot merge the 128 rows that GLM-5.3-Flash's indexer selects on each rank, so here it selects 8,192 tokens: 512
rows. Prompts of up to that many tokens are then attended in whole. On Hopper DCP asks for fewer than 32 attention heads
a rank, so the model of two ranks has 32.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.engine.arms import Arm, Runs, generate, prompt
from tests.engine.branches import BRANCHES, MARGIN, STOCK_BRANCHES, Run, branch_steps, check_hits, differences
from tests.engine.compare import rounded

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1500)]

LENGTHS = (1, 17, 512, 1025, 2048, 4096, 8192, 9000, 16384, 32768)
COLD = [generate(prompt(length, 1000 + length), 16, 200) for length in LENGTHS]

LAYOUTS = {"tp2": (2, 1), "tp2 dcp2": (2, 2), "tp4": (4, 1), "tp4 dcp2": (4, 2), "tp4 dcp4": (4, 4)}
"""Ranks, and how many of them share a sequence's attention cache."""
HITS = {1: [7680, 7168, 6144, 4096], 2: [7680, 7168, 6144, 4096], 4: [7680, 6144, 6144, 4096]}
"""By DCP, the deepest state below each branch that attention reaches too, in blocks of 512 tokens a rank."""


def arms(ranks: int) -> dict[str, tuple[Arm, list[dict[str, Any]]]]:
    """All arms of so many ranks: the gate on, stock, and stock with its other KDA kernel."""
    made = {}
    for name, (tp, dcp) in LAYOUTS.items():
        if tp == ranks:
            made[name] = (Arm(True, tp=tp, dcp=dcp), [*COLD, *branch_steps(BRANCHES)])
            made[f"stock {name}"] = (Arm(False, tp=tp, dcp=dcp), [*COLD, *branch_steps(STOCK_BRANCHES)])
            made[f"triton {name}"] = (Arm(False, backend="triton", tp=tp, dcp=dcp), COLD)
    return made


@pytest.fixture(scope="session")
def all_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Runs]:
    return {
        ranks: Runs(arms(ranks), tmp_path_factory.mktemp(f"tp{ranks}"), at_once, heads=16 * ranks, topk=8192)
        for ranks, at_once in ((2, 3), (4, 2))
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
    own = differences(runs.answers(f"triton {layout}"), stock.cold)
    print(f"\n{layout}, cold, against stock {rounded(found)}; stock's kernels {rounded(own)}")
    assert max(found) <= MARGIN * max(own)


def test_branches_hit_the_state_below_them(layout, ours, stock):
    assert [answer["cached"] for answer in ours.hits] == HITS[LAYOUTS[layout][1]]
    assert [answer["cached"] for answer in ours.uncached] == [0] * len(BRANCHES)
    assert [answer["cached"] for answer in stock.hits] == [7680] * len(STOCK_BRANCHES)


def test_a_hit_differs_from_an_uncached_run_no_more_than_stocks_hits_do(layout, ours, stock):
    print(f"\n{layout}, hits: {check_hits(ours.hits, ours.uncached, stock)}")


def test_every_rank_exports_the_same(layout, runs, ours):
    lines: dict[str, list[str]] = {}
    for rank, rows in re.findall(r"\((Worker\S*) .*(KDA prefill rows: .*)", runs.log(layout)):
        lines.setdefault(rank, []).append(rows)
    assert len(lines) == LAYOUTS[layout][0]
    first, *others = lines.values()
    assert all(other == first for other in others)
    counts = ours.summary["counts"]
    assert len(first) == counts["spans"] < 100  # All are logged.
    assert not any(name.startswith("fallbacks") for name in counts)
