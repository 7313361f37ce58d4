# SPDX-License-Identifier: Apache-2.0
"""The real engine on other block sizes: as large as `kda-prefill layout` says, hits where it says, the same answers."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from tests.engine.arms import Arm, Runs, generate, prompt
from tests.engine.compare import LISTED, difference, rounded
from vllm.kda_prefill_variables import SPLIT_MAMBA, SPLIT_TARGET

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

GIB = 8
LENGTHS = (100, 1024, 2048, 8192, 9000)
BRANCHES = (7900, 7400, 6500, 5000)
BASE = prompt(8192, 1)


def steps() -> list[dict[str, Any]]:
    cold = [generate(prompt(length, 1000 + length), 16, LISTED) for length in LENGTHS]
    branches = [generate(BASE[:at] + prompt(8192 - at, at), 4, 1) for at in BRANCHES]
    return [*cold, {"reset": True}, *cold, {"reset": True}, generate(BASE, 4, 1), *branches, {"summary": True}]


ARMS: dict[str, tuple[Arm, list[dict[str, Any]]]] = {
    "stock": (Arm(False, split=None, cache_gib=GIB), steps()),
    "stock again": (Arm(False, split=None, cache_gib=GIB, label="again"), steps()),
    "stock 512/512": (Arm(False, cache_gib=GIB, label="8gib"), steps()),
    "512/512": (Arm(True, cache_gib=GIB, label="8gib"), steps()),
    "512/1024": (Arm(True, split=("512", "1024"), cache_gib=GIB), steps()),
    "auto": (Arm(True, split=("auto", "auto"), cache_gib=GIB), steps()),
    "refused": (Arm(True, split=None, cache_gib=GIB), [{"summary": True}]),
}
HITS = {"512/512": [7680, 7168, 6144, 4096], "512/1024": [7680, 6144, 6144, 4096], "auto": [7168, 7168, 6144, 4096]}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(ARMS, tmp_path_factory.mktemp("layouts"), at_once=4)


@pytest.fixture(scope="session")
def predicted(runs: Runs) -> dict[str, Any]:
    """Layouts by name, as `kda-prefill layout` reports them for the same model and memory."""
    from vllm.v1.core.block_sizes import BlockSizes
    from vllm_kda_prefill.layout.report import EngineShape, make_report

    shape = EngineShape(runs.model, mtp=3, max_model_len=40000)
    reports = [make_report(shape, GIB << 30, sizes).as_json() for sizes in (None, BlockSizes(512, 1024))]
    layouts = {name: layout for report in reports for name, layout in report["layouts"].items()}
    return {**layouts, "auto": layouts[reports[0]["auto"]], "stock 512/512": layouts["512/512"]}


def cached(answers: list[Any]) -> list[int]:
    return [answer["cached"] for answer in answers[-1 - len(BRANCHES) : -1]]


def cold(answers: list[Any]) -> tuple[list[Any], list[Any]]:
    """An engine's answers to the cold prompts, and to the same once more."""
    return answers[: len(LENGTHS)], answers[len(LENGTHS) + 1 : 2 * len(LENGTHS) + 1]


@pytest.mark.parametrize("arm", ["stock", "stock 512/512", "512/512", "512/1024", "auto"])
def test_the_cache_is_as_large_as_predicted(arm, runs, predicted):
    blocks = runs.answers(arm)[-1]["num_blocks"]
    logged = re.search(r"GPU KV cache size: ([\d,]+) tokens", runs.log(arm))
    assert logged is not None
    tokens = int(logged[1].replace(",", ""))
    print(
        f"\n{arm}: {blocks} blocks, {tokens:,} tokens; "
        f"{predicted[arm]['blocks']}, {predicted[arm]['tokens_of_cache']:,}"
    )
    assert blocks == predicted[arm]["blocks"]
    assert tokens == predicted[arm]["tokens_of_cache"]


@pytest.mark.parametrize("arm", HITS)
def test_branches_hit_the_states_that_were_predicted(arm, runs, predicted):
    positions = [0, *predicted[arm]["ladders"][8192]["positions"]]
    assert [max(position for position in positions if position <= at) for at in BRANCHES] == HITS[arm]
    assert cached(runs.answers(arm)) == HITS[arm]


def test_stocks_layout_has_one_state_that_they_reach(runs):
    assert cached(runs.answers("stock")) == [4608] * len(BRANCHES)


@pytest.mark.parametrize(
    ("arm", "same_kernel"), [("stock 512/512", "stock"), ("512/1024", "512/512"), ("auto", "512/512")]
)
def test_answers_do_not_depend_on_the_layout(arm, same_kernel, runs):
    """Held against what stock's layout differs from itself: in one engine, and in two."""
    own = [
        difference(a, b)
        for left, right in itertools.combinations((*cold(runs.answers("stock")), *cold(runs.answers("stock again"))), 2)
        for a, b in zip(left, right, strict=True)
    ]
    pairs = zip(cold(runs.answers(same_kernel)), cold(runs.answers(arm)), strict=True)
    found = [difference(a, b) for left, right in pairs for a, b in zip(left, right, strict=True)]
    assert [answer["cached"] for answers in cold(runs.answers(arm)) for answer in answers] == [0] * len(found)
    print(f"\n{arm}: stock against itself {rounded(own)}, against {same_kernel} {rounded(found)}")
    # Sparse attention repeats itself to the last bit for prompts short enough that it takes every token.
    short = [value for value, length in zip(found, 2 * LENGTHS, strict=True) if length <= 2048]
    assert short == [0.0] * len(short)
    assert max(found) <= 2 * max(own)


def test_the_gate_refuses_stocks_blocks_with_a_hint(runs):
    with pytest.raises(RuntimeError) as failure:
        runs.answers("refused")
    message = str(failure.value)
    assert "Mamba blocks of 4608 tokens leave" in message
    assert SPLIT_TARGET in message
    assert SPLIT_MAMBA in message
    assert "Loading weights" not in runs.log("refused")
