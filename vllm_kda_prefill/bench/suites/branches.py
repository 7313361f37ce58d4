# SPDX-License-Identifier: Apache-2.0
"""Follow-ups that leave a cached prompt at chosen points, in a full cache or in one with room."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_kda_prefill.bench.budget import Budget
from vllm_kda_prefill.bench.records import Recorder
from vllm_kda_prefill.bench.servers import Server, in_turns, timing
from vllm_kda_prefill.bench.workloads import branch, prompt

SIZE = 8192
POINTS = (7900, 7400, 6500, 5000)
WARM_UPS = 3
ROOM = "branches-room"


async def run(
    servers: Sequence[Server],
    points: Sequence[int],
    samples: int,
    seed: int,
    recorder: Recorder,
    budget: Budget,
    suite: str = "branches",
) -> None:
    """Each round: a cold prompt, then branches off it from the latest point to the earliest.

    In this order no branch can use a state that an earlier one left behind. Three more rounds go first, unrecorded.
    Suite `branches` goes on in the cache as it is, full if anything was measured before; `branches-room` empties it
    before each round.
    """
    for number in budget.rounds(WARM_UPS + samples):
        for server in in_turns(servers, number):
            base = prompt(SIZE, suite, seed, server.name, number)
            if suite == ROOM:
                await server.client.reset_prefix_cache()
            await server.cold(base)
            for point in sorted(points, reverse=True):
                answer = await server.client.complete(branch(base, point, seed, server.name, number))
                if number >= WARM_UPS:
                    recorder.add(
                        "sample",
                        suite=suite,
                        arm=server.name,
                        round=number - WARM_UPS,
                        point=point,
                        **timing(answer),
                    )
