# SPDX-License-Identifier: Apache-2.0
"""Blocks of a request: how many an admission is told to have, and how many it takes and keeps."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import pytest

from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.request import Request
from vllm_kda_prefill.planning import Arm, Engine, Layout

ARMS: tuple[Arm, ...] = ("stock", "coalesced")


def words(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


class Taken(NamedTuple):
    """One allocation: blocks that were estimated, and blocks that left the free list."""

    request_id: str
    estimate: int
    popped: int


def watch_allocations(engine: Engine) -> list[Taken]:
    """Every allocation from now on that succeeds."""
    manager = engine.scheduler.kv_cache_manager
    coordinator, pool = manager.coordinator, manager.block_pool
    estimate_blocks, allocate = coordinator.get_num_blocks_to_allocate, manager.allocate_slots
    estimates: list[tuple[int, int]] = []
    taken: list[Taken] = []

    def estimating(*args: Any, **kwargs: Any) -> int:
        estimate: int = estimate_blocks(*args, **kwargs)
        # A request's whole sequence is estimated before; its allocation's own estimate is the last one.
        estimates.append((estimate, pool.get_num_free_blocks()))
        return estimate

    def allocating(request: Request, *args: Any, **kwargs: Any) -> Any:
        blocks = allocate(request, *args, **kwargs)
        if blocks is not None:
            estimate, free = estimates[-1]
            taken.append(Taken(request.request_id, estimate, free - pool.get_num_free_blocks()))
        return blocks

    coordinator.get_num_blocks_to_allocate, manager.allocate_slots = estimating, allocating
    return taken


class TestAdmissionEstimate:
    """Right: what the estimate asks for is what leaves the free list, hits and speculative blocks included."""

    @pytest.mark.parametrize("mtp", [0, 3])
    @pytest.mark.parametrize("dcp", [1, 2, 4, 8])
    @pytest.mark.parametrize("arm", ARMS)
    def test_it_equals_the_blocks_popped(self, arm: Arm, dcp: int, mtp: int, states: Any) -> None:
        engine = Engine.build(Layout(dcp=dcp, mtp=mtp, mamba_groups=2), arm)
        worker = states.ShadowWorker(engine, checked=False)
        taken = watch_allocations(engine)
        # A cold prompt, its repeat, a longer one, one that leaves at 5,000, and a repeat that decodes over a boundary.
        prompts = [words(8000), words(8000), words(12_000), words(5000) + words(2000, 90_000), words(5100), words(5100)]
        for number, prompt in enumerate(prompts):
            worker.add(f"{number}", prompt, max_tokens=40)
            worker.run()
        assert [one for one in taken if one.estimate != one.popped] == []
        admissions = {one.request_id: one.popped for one in reversed(taken)}
        # A cold prompt of 8,000 tokens runs in one query: attention for it and the drafts behind it, and in both groups
        # a running state, a checkpoint and `mtp` speculative states.
        block = 512 * dcp
        states_taken = 2 * (1 + 1 + mtp)
        assert admissions["0"] == -(-(8000 + mtp) // block) + states_taken
        # Its repeat resumes at 7,680. All of it is free and cached: it takes the same attention blocks (a copy for one
        # that 7,680 lies inside, and that one too), the state that it hits and a running and `mtp` speculative ones.
        assert admissions["1"] == -(-(8000 + mtp) // block) + (7680 % block > 0) + 2 * (1 + 1 + mtp)
        assert len({one.request_id for one in taken}) == len(prompts)
        worker.check_all_returned()


class TestRetirement:
    """Right: states of a long prompt are given back past the null columns between them."""

    @pytest.mark.parametrize(
        "in_flight, held",
        [
            # A running state, the one that the query started from or the checkpoint, and three speculative ones; each
            # step in flight keeps the state that it starts from.
            (1, 6),
            (2, 7),
            (4, 9),
        ],
    )
    @pytest.mark.parametrize("arm", ARMS)
    def test_480000_tokens_hold_a_handful_of_states(self, arm: Arm, in_flight: int, held: int) -> None:
        layout = Layout(mtp=3, num_blocks=1100, max_model_len=524_288)
        engine = Engine.build(layout, arm, asynchronous=in_flight > 1)
        engine.add("long", words(480_000), max_tokens=30)
        (states,) = (
            manager
            for manager in engine.scheduler.kv_cache_manager.coordinator.single_type_managers
            if isinstance(manager, MambaManager)
        )
        steps: deque[Any] = deque()
        most = 0
        # 59 budgets of 8,192 tokens, and some tokens after them.
        for _ in range(65):
            steps.append(engine.scheduler.schedule())
            most = max(most, sum(not block.is_null for block in states.req_to_blocks["long"]))
            while len(steps) >= in_flight:
                engine.answer(steps.popleft())
        assert engine.scheduler.requests["long"].num_computed_tokens > 480_000
        assert most == held
