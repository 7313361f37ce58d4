# SPDX-License-Identifier: Apache-2.0
"""The comparisons of `test_engine.py`, on answers made up here: they run without a GPU, and a fault fails them."""

from __future__ import annotations

import asyncio
import io
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine import test_engine as engine
from tests.engine.arms import Arm
from tests.engine.branches import BASE
from tests.engine.test_serve import faults_at_the_end
from vllm.v1.engine import async_llm
from vllm.v1.engine.exceptions import EngineDeadError

NOISE = 0.1
"""How far a made-up stock answer after a hit, or of another stock engine, is from the plain one."""


class MadeUpArm:
    """Answers steps as an engine would that reuses what its arm retains."""

    def __init__(self, arm: Arm, noise: float = 0.0, fault: float = 0.0, longest: int = 32768) -> None:
        self.arm = arm
        self.noise = noise
        self.fault = fault
        self.longest = longest
        self.has_base = False
        self.zeroed = False

    def run(self, steps: list[dict[str, Any]]) -> list[Any]:
        return [self.step(step) for step in steps]

    def step(self, step: dict[str, Any]) -> Any:
        if "reset" in step:
            self.has_base = self.zeroed = False
            return True
        if "zero_state" in step:
            self.zeroed = True
            return 6
        if "summary" in step:
            return {"block_sizes": [512, 512], "counts": {"spans": 40, "states": 80} if self.arm.gate else None}
        (prompt,) = step["generate"]
        cached = self._cached(prompt)
        self.has_base |= prompt == BASE
        exact = 2048 if self.arm.label == "again" else 1024 if self.arm.backend == "flashkda" else 0
        shift = self.noise if exact < len(prompt) <= self.longest else 0.0
        if cached:
            shift += NOISE + self.fault + (5.0 if self.zeroed else 0.0)
        likeliest = str(sum(prompt) % 31900)
        position = {likeliest: -1.0 - shift} | {f"-{rank}": -9.0 for rank in range(step["logprobs"])}
        count = step["max_tokens"]
        return {"cached": cached, "tokens": [likeliest] * count, "logprobs": [position] * count}

    def _cached(self, prompt: list[int]) -> int:
        if not self.has_base or prompt == BASE:
            return 0
        at = next(index for index, token in enumerate(prompt) if token != BASE[index])
        return max((state for state in (engine.HITS if self.arm.gate else [7680]) if state <= at), default=0)


class MadeUpRuns:
    """A stub of `Runs`; `changed` replaces some arms."""

    def __init__(self, changed: dict[str, MadeUpArm]) -> None:
        own = {"stock again": NOISE, "stock triton": NOISE, "stock in chunks": NOISE}
        self.arms = {name: MadeUpArm(arm, own.get(name, 0.0)) for name, (arm, _) in engine.ARMS.items()} | changed

    def answers(self, name: str) -> list[Any]:
        return self.arms[name].run(engine.ARMS[name][1])


def judge_all(runs: Any) -> None:
    stock, again = (engine.run(runs.answers(name)) for name in ("stock", "stock again"))
    stocks_own = engine.own_differences(runs, stock)
    engine.test_the_random_model_depends_on_its_prompt(stock)
    engine.test_stock_repeats_itself_where_attention_takes_every_token(stock, again)
    engine.test_stock_hits_its_one_state_only(stock, again)
    engine.test_answers_to_other_prompts_are_farther_off_than_that(stock, stocks_own)
    engine.test_flashkda_with_one_export_is_stock_to_the_last_bit(runs, stock)
    engine.test_a_planted_wrong_state_fails_the_test_above(runs, stock)
    for arm in engine.COALESCED:
        engine.test_cold_prompts_differ_no_more_than_stock_from_itself(arm, runs, stocks_own)
        engine.test_branches_hit_the_state_below_them(arm, runs)
        engine.test_a_hit_differs_no_more_than_stocks_hits_do(arm, runs)
        engine.test_the_planner_counted_its_exports(arm, runs)


def test_answers_as_far_apart_as_stocks_own_pass():
    judge_all(MadeUpRuns({"native": MadeUpArm(engine.ARMS["native"][0], noise=NOISE)}))


@pytest.mark.parametrize("longest", [2048, 32768], ids=["short prompts", "any"])
@pytest.mark.parametrize("arm", engine.COALESCED)
def test_a_cold_answer_that_is_too_far_off_fails(arm, longest):
    with pytest.raises(AssertionError):
        judge_all(MadeUpRuns({arm: MadeUpArm(engine.ARMS[arm][0], noise=3 * NOISE, longest=longest)}))


@pytest.mark.parametrize("arm", engine.COALESCED)
def test_an_answer_after_a_hit_that_is_too_far_off_fails(arm):
    with pytest.raises(AssertionError, match="differences"):
        judge_all(MadeUpRuns({arm: MadeUpArm(engine.ARMS[arm][0], fault=2 * NOISE)}))


@pytest.mark.parametrize(("error", "faults"), [(EngineDeadError(), 0), (ValueError("a wrong state"), 1)])
def test_what_stock_logs_at_a_servers_end_is_no_fault(error, faults, monkeypatch):
    """Stock's own task that hands outputs on, told what it is told when the one that receives them is cancelled."""
    written = io.StringIO()
    monkeypatch.setattr(async_llm, "logger", logging.Logger("ending"))
    async_llm.logger.addHandler(logging.StreamHandler(written))
    frontend: Any = async_llm.AsyncLLM.__new__(async_llm.AsyncLLM)
    told: list[Exception] = []

    async def get_output_async():
        raise error

    frontend.output_handler = frontend.logger_manager = None
    frontend.log_stats = False
    frontend.renderer = SimpleNamespace(mm_processor_cache=None)
    frontend.engine_core = SimpleNamespace(get_output_async=get_output_async)
    frontend.output_processor = SimpleNamespace(propagate_error=told.append)

    async def run():
        frontend._run_output_handler()
        await frontend.output_handler

    asyncio.run(run())
    assert told == [error]
    assert written.getvalue().count("Traceback") == 1
    assert faults_at_the_end(written.getvalue()) == faults
