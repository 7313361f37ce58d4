# SPDX-License-Identifier: Apache-2.0
"""Aborts at every stage of a request: all blocks come back, and the prefix cache promises what was written only.

Blocks enter the cache while a step is scheduled, before it runs. An abort in between is harmless as long as the step
still runs, and vLLM 0.33.0's engine core sees to that. `EngineCore.step` and `step_with_batch_queue` hand a step to the
executor in the statement after `schedule()`, and handle aborts only before that or after its answer. Pausing, sleeping
and shutting down wait until no step is left (`has_work`, `_pause_complete`). A reset of the cache drops every entry. An
exception ends the engine, with one exception: under `--enable-fault-tolerance` `EngineCoreSentinel.on_fault` aborts all
requests, and the engine serves on without the steps in flight. Stock then keeps entries of unwritten blocks.
"""

from __future__ import annotations

import queue
import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.traffic.world import Setting, World
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.fault_tolerance.engine_core_sentinel import EngineCoreSentinel
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm_kda_prefill.planning import Arm, Engine, Layout

SMALL = Layout(attention_block=32, mamba_block=32, mtp=3, budget=256, num_blocks=60, max_model_len=4096)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The toy model's matrices are too small to share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class LateExecutor:
    """Runs the toy model's steps in order, and not before an answer is waited for. Aborts arrive meanwhile."""

    def __init__(self, world: World, core: EngineCore) -> None:
        self.world = world
        self.core = core
        self.waiting: deque[tuple[SchedulerOutput, Answer]] = deque()
        self.aborted: list[str] = []

    def execute_model(self, output: SchedulerOutput, non_block: bool) -> Answer:
        answer = Answer(self)
        self.waiting.append((output, answer))
        # A client leaves right after its request's first step was scheduled.
        names = [new.req_id for new in output.scheduled_new_reqs]
        if names:
            self.core.aborts_queue.put(names)
            self.aborted += names
        return answer

    def sample_tokens(self, grammar: object, non_block: bool) -> Answer:
        return self.waiting[-1][1]

    def run_until(self, answer: Answer) -> None:
        while not answer.done():
            output, oldest = self.waiting.popleft()
            result = self.world.server.worker.execute(output)
            request_ids = list(result.sampled)
            oldest.set_result(
                ModelRunnerOutput(
                    req_ids=request_ids,
                    req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
                    sampled_token_ids=list(result.sampled.values()),
                )
            )


class Answer(Future[ModelRunnerOutput]):
    """A step's answer; waiting for it runs the steps up to it."""

    def __init__(self, executor: LateExecutor) -> None:
        super().__init__()
        self.executor = executor

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        self.executor.run_until(self)
        return super().result()


def engine_core(world: World, steps_in_flight: int) -> EngineCore:
    """vLLM's engine core around a scheduler and an executor, without the processes."""
    core = EngineCore.__new__(EngineCore)
    core.scheduler = world.scheduler
    core.vllm_config = world.scheduler.vllm_config
    core.log_stats = core.is_mm_encoder_only = core.is_pooling_model = core.check_for_draft_tokens = False
    core.aborts_queue = queue.Queue()
    core.batch_queue_size = steps_in_flight
    core.batch_queue = deque(maxlen=steps_in_flight)
    core._weight_version = ""
    core.model_executor = LateExecutor(world, core)
    return core


class TestAbortBeforeTheStepRuns:
    """Right: the step still runs, so each entry it published is of a written block."""

    @pytest.mark.parametrize("steps_in_flight", [1, 2])
    @pytest.mark.parametrize("arm", ["stock", "coalesced"])
    def test_vllms_engine_core_runs_it(self, arm: Arm, steps_in_flight: int) -> None:
        world = World(Setting(SMALL, arm, asynchronous=steps_in_flight > 1))
        core = engine_core(world, steps_in_flight)
        step = core.step if steps_in_flight == 1 else core.step_with_batch_queue
        prompt = world.words(240)
        names = [world.arrive(prompt, outputs=20), world.arrive(prompt[:100] + world.words(400), outputs=20)]
        while core.scheduler.has_requests() or core.batch_queue:
            step()
        # Both left after their first step, one with 240 tokens written and one with what the budget left it.
        assert core.model_executor.aborted == names
        assert not any(request.num_output_tokens for request in world.requests.values())
        world.check_cache()
        kept = list(world.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache)
        assert len(kept) >= 240 // 32
        # Whoever has the prompt now resumes at its tail, (240 - 1) // 32 * 32, and samples what an uncached run does.
        world.arrive(prompt, outputs=5)
        world.drain()
        assert world.counts["hit tokens"] == 224


class TestStepsThatFaultToleranceDrops:
    """Right: nothing that a dropped step was to write is served."""

    def drop_a_step(self, arm: Arm, states: Any, monkeypatch: pytest.MonkeyPatch, tolerant: bool = True) -> Any:
        """A prompt's last chunk is scheduled, its client leaves, and the executor raises instead of running it."""
        worker = states.ShadowWorker(Engine.build(Layout(), arm))
        scheduler: Scheduler = worker.scheduler
        monkeypatch.setattr(scheduler.parallel_config, "enable_fault_tolerance", tolerant)
        worker.add("a", list(range(16_000)))
        worker.deliver(worker.step())
        scheduler.schedule()
        worker.add("b", list(range(16_000)))
        scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
        engine: Any = SimpleNamespace(
            engine_index=0,
            scheduler=scheduler,
            model_executor=object(),
            output_queue=queue.SimpleQueue(),
            _send_abort_outputs=lambda aborted: None,
        )
        EngineCoreSentinel(engine, scheduler.parallel_config).on_fault(RuntimeError("a rank has gone"))
        assert not scheduler.requests
        return worker

    def test_stock_serves_them(self, states: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        worker = self.drop_a_step("stock", states, monkeypatch)
        with pytest.raises(states.Fault, match=r"is cached up to \d+; token \d+ is wrong"):
            worker.check_cache()

    def test_they_are_forgotten(self, states: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        worker = self.drop_a_step("coalesced", states, monkeypatch)
        manager = worker.scheduler.kv_cache_manager
        assert not list(states.entries(manager.block_pool))
        assert manager.eviction.levels()["probationary_blocks"] == 0
        # The next request computes all of it, in the budgets of a cold prompt.
        worker.add("c", list(range(16_000)))
        answer = worker.step()
        assert answer.output.num_scheduled_tokens == {"c": 8192}
        worker.deliver(answer)
        worker.run()
        worker.check_all_returned()

    def test_a_pause_without_fault_tolerance_keeps_the_cache(
        self, states: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worker = self.drop_a_step("coalesced", states, monkeypatch, tolerant=False)
        assert list(states.entries(worker.scheduler.kv_cache_manager.block_pool))


STAGES = ("waiting", "scheduled", "prefilling", "decoding", "preempted")


def stage(request: Request, in_flight: Iterable[SchedulerOutput]) -> str:
    if request.status != RequestStatus.RUNNING:
        return "preempted" if request.num_preemptions else "waiting"
    if any(request.request_id in output.num_scheduled_tokens for output in in_flight):
        return "scheduled"
    return "prefilling" if request.num_computed_tokens < request.num_prompt_tokens else "decoding"


class TestRandomAborts:
    """Right: whatever stage a request is aborted at, all its blocks come back, and what it wrote may stay cached."""

    def test_500_of_them_leave_every_block_free(self, states: Any) -> None:
        # Steps of the worker of labels are answered at once or one step late; every entry is checked after each.
        stages: Counter[str] = Counter()
        for seed in range(10):
            rng = random.Random(seed)
            layout = Layout(16, 16, dcp=1 + seed // 5, mtp=3, budget=128, num_blocks=30, scheduling="priority")
            worker = states.ShadowWorker(Engine.build(layout, asynchronous=seed % 2 > 0), seed)
            base = [rng.randrange(50_000) for _ in range(200)]
            answers: deque[Any] = deque()
            aborts = 0
            while aborts < 50:
                while len(worker.scheduler.requests) < 4:
                    tokens = base[: rng.randint(0, 150)] + [rng.randrange(50_000) for _ in range(rng.randint(1, 80))]
                    worker.add(f"r{len(worker.requests)}", tokens, rng.randint(1, 40), rng.randint(0, 3))
                answers.append(worker.step())
                while len(answers) > seed % 2 or (answers and rng.random() < 0.3):
                    # The step has run, and its answer is not back.
                    aborts += self.abort_one(worker, rng, stages, answers)
                    worker.deliver(answers.popleft())
                aborts += self.abort_one(worker, rng, stages, answers)
            worker.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
            while answers:
                worker.deliver(answers.popleft())
            worker.check_all_returned()
            assert worker.plans
        assert stages.total() >= 500
        assert min(stages[name] for name in STAGES) >= 5, stages

    def abort_one(self, worker: Any, rng: random.Random, stages: Counter[str], answers: Iterable[Any]) -> int:
        if rng.random() < 0.7 or not worker.scheduler.requests:
            return 0
        request = worker.scheduler.requests[rng.choice(sorted(worker.scheduler.requests))]
        stages[stage(request, [answer.output for answer in answers])] += 1
        worker.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        return 1

    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_a_step_that_runs_after_the_abort_writes_it(self, asynchronous: bool) -> None:
        # The toy model runs steps late: an abort comes before the step that publishes what it cached.
        rng = random.Random(asynchronous)
        world = World(Setting(replace(SMALL, num_blocks=44, scheduling="priority"), asynchronous=asynchronous))
        base = world.words(500)
        stages: Counter[str] = Counter()
        while stages["scheduled"] < 12:
            while len(world.live) < 3:
                fresh = world.words(rng.randint(1, 200))
                world.arrive(base[: rng.randint(0, 300)] + fresh, rng.randint(1, 30), rng.randint(0, 3))
            world.schedule()
            if rng.random() < 0.6:
                name = rng.choice(world.live)
                stages[stage(world.requests[name], world.server.in_flight)] += 1
                world.abort(name)
            while world.server.in_flight and rng.random() < 0.6:
                world.run_oldest()
        world.drain()  # Every block is free after it, and no manager remembers a request.
        world.check_cache()
        assert world.counts["exports"] > 0
