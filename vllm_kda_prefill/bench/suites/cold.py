"""Time to first token of prompts that nobody has sent before."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_kda_prefill.bench.budget import Budget
from vllm_kda_prefill.bench.lanes import Lane, in_turns, timing
from vllm_kda_prefill.bench.records import Recorder
from vllm_kda_prefill.bench.workloads import prompt

SIZES = (8192, 16384, 32768)
GROWTH_SIZES = (2048, 4096, 8192, 16384, 32768, 65536, 131072)


async def run(
    lanes: Sequence[Lane],
    sizes: Sequence[int],
    samples: int,
    seed: int,
    recorder: Recorder,
    budget: Budget,
    suite: str = "cold",
) -> None:
    """Up to `samples` prompts of each size for every lane, each found to have zero cached tokens.

    Sizes of another suite than `cold` have not been warmed up: their first round is not recorded.
    """
    warm_ups = int(suite != "cold")
    for number in budget.rounds(warm_ups + samples):
        for place, size in enumerate(sizes):
            for lane in in_turns(lanes, number + place):
                tokens = prompt(size, suite, seed, lane.name, number)
                answer = await lane.cold(tokens)
                if number >= warm_ups:
                    recorder.add("sample", suite=suite, arm=lane.name, round=number, size=size, **timing(answer))
