# SPDX-License-Identifier: Apache-2.0
"""Cached tokens of conversations by KV cache size, from vLLM's real scheduler and KV cache manager."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kda_prefill.bench.records import Recorder
from vllm_kda_prefill.bench.workloads import Conversations

# The platform first: see there.
from vllm_kda_prefill.planning import Arm, Engine, Layout  # isort: skip

from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.core.state_retention import Policy
from vllm_kda_prefill.plan.report import bytes_per_state
from vllm_kda_prefill.spans import mamba_managers

ARMS: dict[str, tuple[Arm, Policy]] = {
    "stock": ("stock", "ladder"),
    "ladder": ("coalesced", "ladder"),
    "replay": ("coalesced", "replay"),
}
PARTS = (1.0, 0.5, 0.25, 0.125)
UNLIMITED = 40_000
MARGIN = 8


@dataclass(frozen=True)
class Reuse:
    """What one arm found and kept over a trace.

    Attributes:
        prompt: Prompt tokens of all turns.
        cached: Of these, tokens found in the prefix cache.
        passes: Prefill passes.
        evicted_states: States whose entry was dropped for another block, in states of all groups.
        held_states: States in the cache at the end.
        held_bytes: What these take, unpadded, over all KDA layers and ranks.
        blocks: Blocks with an entry at the end.
    """

    prompt: int
    cached: int
    passes: int
    evicted_states: int
    held_states: int
    held_bytes: int
    blocks: int


def serve(layout: Layout, arm: str, trace: Conversations) -> Reuse:
    """Serve the turns of a trace one after another."""
    engine = Engine.build(layout, *ARMS[arm])
    evictions = _count_evictions(engine)
    prompt = cached = passes = 0
    for number, turn in enumerate(trace):
        engine.add(str(number), turn.tokens)
        prompt += len(turn.tokens)
        while engine.scheduler.has_unfinished_requests():
            output = engine.step()
            passes += str(number) in output.num_scheduled_tokens
            cached += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
    states = {m.kv_cache_group_id for m in mamba_managers(engine.scheduler.kv_cache_manager)}
    pool = engine.scheduler.kv_cache_manager.block_pool
    held = Counter(get_group_id(block.block_hash) for block in pool.blocks if block.block_hash is not None)
    held_states = sum(held[group] for group in states) // len(states)
    return Reuse(
        prompt=prompt,
        cached=cached,
        passes=passes,
        evicted_states=sum(evictions[group] for group in states) // len(states),
        held_states=held_states,
        held_bytes=held_states * bytes_per_state(engine),
        blocks=held.total(),
    )


def _count_evictions(engine: Engine) -> Counter[int]:
    """Counts, by KV cache group, the entries that go because their block is wanted."""
    pool: Any = engine.scheduler.kv_cache_manager.block_pool
    evict = pool._maybe_evict_cached_block
    counts: Counter[int] = Counter()

    def counting(block: Any) -> bool:
        if block.block_hash is not None:
            counts[get_group_id(block.block_hash)] += 1
        return evict(block)

    pool._maybe_evict_cached_block = counting
    return counts


def measure(
    turns: int,
    branching: Sequence[float],
    traces: int,
    dcp: int,
    mtp: int,
    groups: int,
    seed: int,
    output: Path,
) -> None:
    """Record every arm over every trace, in a cache that holds all that any arm keeps, and in parts of it."""
    configuration = {
        "turns": turns,
        "branching": list(branching),
        "traces": traces,
        "dcp": dcp,
        "mtp": mtp,
        "mamba_groups": groups,
        "seed": seed,
        "workload": dataclasses.asdict(Conversations()),
    }
    with Recorder(output, configuration) as recorder:
        for probability in branching:
            for number in range(traces):
                trace = Conversations(turns=turns, branching=probability, seed=seed + number)
                layout = Layout(dcp=dcp, mtp=mtp, mamba_groups=groups, num_blocks=UNLIMITED)
                unlimited = {arm: serve(layout, arm, trace) for arm in ARMS}
                running = -(-trace.longest // (512 * dcp)) + groups * (MARGIN + mtp)
                ample = max(reuse.blocks for reuse in unlimited.values()) + running
                for part in PARTS:
                    blocks = max(int(ample * part), running)
                    sized = dataclasses.replace(layout, num_blocks=blocks)
                    for arm in ARMS:
                        reuse = serve(sized, arm, trace)
                        recorder.add(
                            "sample",
                            suite="reuse",
                            arm=arm,
                            branching=probability,
                            trace=trace.seed,
                            part=part,
                            cache_blocks=blocks,
                            **dataclasses.asdict(reuse),
                        )
