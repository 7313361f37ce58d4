# SPDX-License-Identifier: Apache-2.0
"""Recorded prompts through vLLM's real scheduler and KV cache manager; no model, no tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

# The platform first: see there.
from vllm_kda_prefill.planning import Arm, Engine, Layout  # isort: skip

from vllm.sampling_params import SamplingParams
from vllm.v1.core.state_retention import Policy
from vllm.v1.request import Request
from vllm_kda_prefill.trace.arrivals import Arrivals
from vllm_kda_prefill.trace.errors import TraceError
from vllm_kda_prefill.trace.hashes import block_hasher
from vllm_kda_prefill.trace.prompts import Prompt, Trace
from vllm_kda_prefill.trace.state_counts import StateCounts, StateWatch

ARMS: dict[str, tuple[Arm, Policy]] = {
    "stock": ("stock", "ladder"),
    "ladder": ("coalesced", "ladder"),
    "replay": ("coalesced", "replay"),
}


@dataclass
class Replay:
    """What one arm did with a trace.

    Attributes:
        prompt_tokens: Prompt tokens of all requests.
        cached_tokens: Of these, tokens found in the prefix cache when a request was admitted.
        computed_tokens: Prefill tokens computed, after a preemption again.
        steps: Steps of the scheduler.
        most_running: Most requests in one step.
        states: What became of the states.
        held_states: States in the prefix cache at the end.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    steps: int = 0
    most_running: int = 0
    states: StateCounts = field(default_factory=StateCounts)
    held_states: int = 0


def replay(
    layout: Layout, arm: str, trace: Trace, arrivals: Arrivals, on_finish: Callable[[int], None] = lambda _: None
) -> Replay:
    """Serve all prompts of a trace, each for one token of answer.

    Args:
        layout: The KV cache and the scheduler's settings.
        arm: Of `ARMS`.
        trace: The prompts.
        arrivals: When they come.
        on_finish: Called with the number of requests that have finished in a step.

    Raises:
        TraceError: The KV cache cannot hold the trace's longest prompt.
    """
    _check_room(layout, arm, trace)
    server = _Server(Engine.build(layout, *ARMS[arm]))
    sent = finished = 0
    while finished < len(trace.prompts):
        come = min(arrivals.come(sent, sent - finished), len(trace.prompts))
        for number in range(sent, come):
            server.add(number, trace.prompts[number])
        sent = come
        arrivals.note_step(server.step())
        done = sent - server.unfinished
        on_finish(done - finished)
        finished = done
    return server.result()


def _check_room(layout: Layout, arm: str, trace: Trace) -> None:
    """Serve the longest prompt alone: a scheduler whose cache is too small for it would try for ever."""
    server = _Server(Engine.build(layout, *ARMS[arm]))
    server.add(0, max(trace.prompts, key=lambda prompt: prompt.tokens))
    while server.unfinished:
        if not server.step():
            raise TraceError(
                f"{layout.num_blocks} blocks do not hold a prompt of {trace.longest} tokens: give more blocks, or cut "
                "prompts with --longest"
            )


class _Server:
    """One scheduler, fed with prompts and counted."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._watch = StateWatch(engine.scheduler)
        self._hash_block: int = engine.scheduler.kv_cache_manager.block_pool.hash_block_size
        self._lookahead: int = engine.scheduler.kv_cache_manager.block_pool.num_hash_lookahead_tokens
        self._sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        self._admitted: set[str] = set()
        self._replay = Replay(states=self._watch.counts)

    def add(self, number: int, prompt: Prompt) -> None:
        request = Request(
            str(number),
            # Nothing reads them: the hashes come from the trace.
            [0] * prompt.tokens,
            self._sampling,
            pooling_params=None,
            arrival_time=float(number),
            block_hasher=block_hasher(prompt, number, self._hash_block, self._lookahead),
        )
        self._engine.scheduler.add_request(request)
        self._replay.prompt_tokens += prompt.tokens

    def step(self) -> int:
        """Schedule a step and answer it.

        Returns:
            Its tokens.
        """
        scheduler = self._engine.scheduler
        output = scheduler.schedule()
        tokens: int = output.total_num_scheduled_tokens
        # A request that was preempted is admitted again, and finds its own blocks.
        admitted = {
            new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs if new.req_id not in self._admitted
        }
        self._admitted |= admitted.keys()
        self._watch.note_step((scheduler.requests[request_id], cached) for request_id, cached in admitted.items())
        count = self._replay
        count.cached_tokens += sum(admitted.values())
        count.computed_tokens += tokens
        count.steps += 1
        count.most_running = max(count.most_running, len(output.num_scheduled_tokens))
        self._engine.answer(output)
        return tokens

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._engine.scheduler.requests)

    def result(self) -> Replay:
        """What was counted so far."""
        self._replay.held_states = self._watch.held
        return self._replay
