# SPDX-License-Identifier: Apache-2.0
"""Decoding at a context: tokens and steps a second, one or several requests at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_kda_prefill.bench import metrics
from vllm_kda_prefill.bench.budget import Budget
from vllm_kda_prefill.bench.client import Answer
from vllm_kda_prefill.bench.errors import BenchError
from vllm_kda_prefill.bench.records import Recorder
from vllm_kda_prefill.bench.servers import Server, in_turns
from vllm_kda_prefill.bench.workloads import prompt

CONTEXTS = (8192, 32768)
CONCURRENCIES = (1, 4)
OUTPUT = 256
WARM_UP_OUTPUT = 24


@dataclass(frozen=True)
class Window:
    """The time in which every request decodes: from the last one's first token to the first one's end.

    Attributes:
        tokens: Tokens that arrived in it, of all requests.
        seconds: Its length.
    """

    tokens: int
    seconds: float

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Window:
        """Of requests that ran at once.

        Raises:
            BenchError: They did not.
        """
        begin = max(answer.sent + answer.arrivals[0].seconds for answer in answers)
        end = min(answer.sent + answer.arrivals[-1].seconds for answer in answers)
        if end <= begin:
            raise BenchError("one request had ended before the last began to decode; raise --output-tokens")
        tokens = 0
        for answer in answers:
            # What had arrived by the window's begin is its start, not part of it.
            counts = [a.tokens for a in answer.arrivals if answer.sent + a.seconds <= end]
            started = [a.tokens for a in answer.arrivals if answer.sent + a.seconds <= begin]
            tokens += counts[-1] - started[-1]
        return cls(tokens, end - begin)


async def run(
    servers: Sequence[Server],
    contexts: Sequence[int],
    concurrencies: Sequence[int],
    samples: int,
    output: int,
    seed: int,
    recorder: Recorder,
    budget: Budget,
) -> None:
    """Each round: prompts are made warm, then decoded at once; steps come from the server's own draft counters.

    Rounds decode the same prompts, so that most find them cached and the time goes into decoding.
    """
    for context in contexts:
        for requests in concurrencies:
            for server in servers:
                await _decode(server, context, requests, WARM_UP_OUTPUT, seed)
    for number in budget.rounds(samples):
        for context in contexts:
            for requests in concurrencies:
                for server in in_turns(servers, number):
                    await _measure(server, context, requests, output, seed, recorder, number)


async def _decode(server: Server, context: int, requests: int, output: int, seed: int) -> list[Answer]:
    """Make prompts warm and decode them at once."""
    prompts = [prompt(context, "decode", seed, context, requests, index) for index in range(requests)]
    for tokens in prompts:
        await server.client.complete(tokens)
    return await asyncio.gather(*(server.client.complete(tokens, output) for tokens in prompts))


async def _measure(
    server: Server, context: int, requests: int, output: int, seed: int, recorder: Recorder, number: int
) -> None:
    before = await server.client.metrics()
    answers = await _decode(server, context, requests, output, seed)
    moved = (await server.client.metrics()).since(before)
    drafts, accepted = moved.get(metrics.DRAFTS, 0.0), moved.get(metrics.ACCEPTED, 0.0)
    window = Window.of(answers)
    acceptance = 1 + accepted / drafts if drafts else 1.0
    rate = window.tokens / window.seconds
    recorder.add(
        "sample",
        suite="decode",
        arm=server.name,
        round=number,
        context=context,
        requests=requests,
        output=output,
        tokens=window.tokens,
        seconds=round(window.seconds, 6),
        tokens_per_second=round(rate, 3),
        acceptance_length=round(acceptance, 4),
        steps_per_second=round(rate / requests / acceptance, 3),
    )
