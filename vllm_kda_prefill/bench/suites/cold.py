# SPDX-License-Identifier: Apache-2.0
"""Time to first token of prompts that nobody has sent before."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_kda_prefill.bench.budget import Budget
from vllm_kda_prefill.bench.records import Recorder
from vllm_kda_prefill.bench.servers import Server, in_turns, timing
from vllm_kda_prefill.bench.workloads import prompt

SIZES = (8192, 16384, 32768)
GROWTH_SIZES = (2048, 4096, 8192, 16384, 32768, 65536, 131072)


async def run(
    servers: Sequence[Server],
    sizes: Sequence[int],
    samples: int,
    seed: int,
    recorder: Recorder,
    budget: Budget,
    suite: str = "cold",
) -> None:
    """Up to `samples` prompts of each size for every server, each found to have zero cached tokens.

    Sizes of another suite than `cold` have not been warmed up: their first round is not recorded.
    """
    warm_ups = int(suite != "cold")
    for number in budget.rounds(warm_ups + samples):
        for place, size in enumerate(sizes):
            for server in in_turns(servers, number + place):
                tokens = prompt(size, suite, seed, server.name, number)
                answer = await server.cold(tokens)
                if number >= warm_ups:
                    recorder.add("sample", suite=suite, arm=server.name, round=number, size=size, **timing(answer))
