# SPDX-License-Identifier: Apache-2.0
"""Conversations that extend and branch: time to first token and cached tokens of every turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vllm_kda_prefill.bench import metrics
from vllm_kda_prefill.bench.budget import Budget
from vllm_kda_prefill.bench.records import Recorder
from vllm_kda_prefill.bench.servers import Server, in_turns, timing
from vllm_kda_prefill.bench.workloads import Conversations

WARM_UP_TURNS = 16


async def run(
    servers: Sequence[Server], workload: Conversations, most: int, recorder: Recorder, budget: Budget
) -> None:
    """Up to `most` traces of the workload, each from an empty cache; every server serves the same turns, in turns.

    A trace that outlasts the budget ends early, for all servers at the same turn.
    """
    for turn in dataclasses.replace(workload, seed=-workload.seed, turns=WARM_UP_TURNS):
        for server in servers:
            await server.client.complete(turn.tokens)
    for number in budget.rounds(most):
        trace = dataclasses.replace(workload, seed=workload.seed + number)
        before = {}
        for server in servers:
            await server.client.reset_prefix_cache()
            before[server.name] = await server.client.metrics()
        for index, turn in enumerate(trace):
            if budget.left < 0:
                break
            for server in in_turns(servers, index):
                answer = await server.client.complete(turn.tokens)
                recorder.add(
                    "sample",
                    suite="conversations",
                    arm=server.name,
                    trace=trace.seed,
                    turn=index,
                    user=turn.user,
                    what=turn.kind,
                    kept=turn.kept,
                    **timing(answer),
                )
        for server in servers:
            after = await server.client.metrics()
            counters = after.since(before[server.name])
            held = after[metrics.PROBATIONARY_BLOCKS]
            recorder.add(
                "counters",
                suite="conversations",
                arm=server.name,
                trace=trace.seed,
                counters=counters,
                probationary_blocks=held,
            )
