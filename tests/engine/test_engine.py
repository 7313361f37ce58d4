"""The real engine with GLM-5.3-Flash layer shapes and random weights, gate on against gate off."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.arms import Arm, prompt, run
from tests.engine.glm import write_config

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

LENGTHS: tuple[int, ...] = (
    1,
    2,
    15,
    16,
    17,
    100,
    511,
    512,
    513,
    514,
    1023,
    1024,
    1025,
    2048,
    3000,
    4095,
    4096,
    4608,
    8191,
    8192,
)
LENGTHS += (8193, 9000, 16384, 32768)
BRANCHES = (7900, 7400, 6500, 5000)
HITS = {"ladder": [7680, 7168, 6144, 4096], "stock": [7680, 0, 0, 0]}
BASE = prompt(8192, 1)


def branch(at: int) -> list[int]:
    """A prompt of 8,192 tokens that leaves BASE at `at`."""
    return BASE[:at] + prompt(8192 - at, at)


def generate(tokens: list[int], max_tokens: int, logprobs: int) -> dict[str, Any]:
    return {"generate": [tokens], "max_tokens": max_tokens, "logprobs": logprobs}


COLD = [generate(prompt(length, 1000 + length), 64, 1) for length in LENGTHS]
HOT = [generate(BASE, 8, 20), *(generate(branch(at), 8, 20) for at in BRANCHES)]
UNCACHED = [step for at in BRANCHES for step in ({"reset": True}, generate(branch(at), 8, 20))]
STEPS = [*COLD, {"reset": True}, *HOT, *UNCACHED, {"summary": True}]
FAULT = [generate(BASE, 1, 1), {"zero_state": 7168}, generate(branch(7400), 8, 20)]

MODES: dict[str, dict[str, Any]] = {"eager": {"eager": True}, "graphs": {"eager": False}, "no-mtp": {"mtp": 0}}


class Run:
    """What one arm answered."""

    def __init__(self, results: list[Any]) -> None:
        *answers, self.summary = [answer[0] if isinstance(answer, list) else answer for answer in results]
        self.cold = answers[: len(COLD)]
        hot = answers[len(COLD) + 1 :]
        self.hits = hot[1 : 1 + len(BRANCHES)]
        self.uncached = hot[1 + len(BRANCHES) + 1 :: 2]


class Runs:
    """Every arm's run, a few at a time on the one GPU; an arm that failed fails the tests that ask for it."""

    def __init__(self, folder: Path) -> None:
        model = write_config(folder / "glm")
        # FlashKDA on both sides: the same kernel over the same spans has to give the same bits.
        jobs: dict[tuple[str, bool], tuple[Arm, list[dict[str, Any]]]] = {
            (mode, gate): (Arm(gate, backend="flashkda" if gate else "auto", **options), STEPS)
            for mode, options in MODES.items()
            for gate in (False, True)
        }
        jobs["native", True] = (Arm(True, backend="native"), STEPS)
        jobs["fault", True] = (Arm(True, backend="flashkda", label="fault"), FAULT)
        with ThreadPoolExecutor(3) as pool:
            self._futures = {key: pool.submit(run, arm, model, steps, folder) for key, (arm, steps) in jobs.items()}

    def __getitem__(self, key: tuple[str, bool]) -> Any:
        answers = self._futures[key].result()
        return answers if key[0] == "fault" else Run(answers)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    kept = os.environ.get("KDA_ENGINE_LOGS")
    return Runs(Path(kept) if kept else tmp_path_factory.mktemp("engine"))


def difference(left: dict[str, Any], right: dict[str, Any]) -> float:
    """Largest difference between two answers' logprobs, over tokens that both list, up to the first position
    whose token differs."""
    worst = 0.0
    for position, (a, b) in enumerate(zip(left["logprobs"], right["logprobs"], strict=True)):
        worst = max([worst, *(abs(a[token] - b[token]) for token in a.keys() & b.keys())])
        if left["tokens"][position] != right["tokens"][position]:
            break
    return worst


@pytest.mark.parametrize("mode", MODES)
def test_the_random_model_depends_on_its_prompt(mode, runs):
    tokens = {tuple(answer["tokens"]) for answer in runs[mode, False].cold}
    assert len(tokens) > len(LENGTHS) * 0.9
    assert max(next(iter(a["logprobs"][0].values())) for a in runs[mode, False].cold) > -9.0


@pytest.mark.parametrize("mode", MODES)
def test_cold_prompts_answer_as_stock_does(mode, runs):
    for length, off, on in zip(LENGTHS, runs[mode, False].cold, runs[mode, True].cold, strict=True):
        assert off["cached"] == on["cached"] == 0
        assert on["tokens"] == off["tokens"], f"{length} tokens"
        assert on["logprobs"] == off["logprobs"], f"{length} tokens"


@pytest.mark.parametrize("mode", [*MODES, "native"])
def test_branches_hit_the_state_below_them(mode, runs):
    assert [answer["cached"] for answer in runs[mode, True].hits] == HITS["ladder"]
    assert [answer["cached"] for answer in runs[mode, True].uncached] == [0] * len(BRANCHES)


@pytest.mark.parametrize("mode", MODES)
def test_stock_hits_its_one_state_only(mode, runs):
    assert [answer["cached"] for answer in runs[mode, False].hits] == HITS["stock"]


def tolerance(stock: Run) -> float:
    """What stock's own hit at 7,680 differs from its uncached run."""
    return difference(stock.hits[0], stock.uncached[0])


@pytest.mark.parametrize("mode", [*MODES, "native"])
def test_a_hit_answers_as_an_uncached_run_within_stocks_own_difference(mode, runs):
    allowed = tolerance(runs["eager" if mode == "native" else mode, False])
    differences = [
        difference(hit, uncached)
        for hit, uncached in zip(runs[mode, True].hits, runs[mode, True].uncached, strict=True)
    ]
    print(f"{mode}: stock's own difference {allowed:.4f}, ours {[round(d, 4) for d in differences]}")
    assert max(differences) <= allowed


def test_the_native_kernel_answers_as_stocks_within_the_difference_of_a_hit(runs):
    allowed = tolerance(runs["eager", False])
    differences = [
        difference(stock, ours)
        for stock, ours in zip(runs["eager", False].uncached, runs["native", True].uncached, strict=True)
    ]
    print(f"native against FlashKDA, uncached: {[round(d, 4) for d in differences]}, allowed {allowed:.4f}")
    assert max(differences) <= 2 * allowed


def test_a_planted_wrong_state_is_seen(runs):
    _, zeroed, answers = runs["fault", True]
    assert zeroed > 0
    assert answers[0]["cached"] == 7168
    wrong = difference(answers[0], runs["eager", True].uncached[1])
    print(f"a zeroed state differs by {wrong:.4f}")
    assert wrong > 3 * tolerance(runs["eager", False])


@pytest.mark.parametrize("mode", MODES)
def test_the_planner_counted_its_exports(mode, runs):
    summary = runs[mode, True].summary
    assert summary["block_sizes"][:2] == [512, 512]
    counts = summary["counts"]
    assert not any(name.startswith("fallbacks") for name in counts)
    # Cold prompts, the base and the uncached branches export all their rungs; each branch what it computes.
    assert counts["states"] >= 4 * (1 + len(BRANCHES))
    assert runs[mode, False].summary["counts"] is None
