# SPDX-License-Identifier: Apache-2.0
"""Three warm-ups a shape, and five probes that a server counts its hits."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_kda_prefill.bench.errors import BenchError
from vllm_kda_prefill.bench.records import Recorder
from vllm_kda_prefill.bench.servers import Server
from vllm_kda_prefill.bench.workloads import branch, prompt

WARM_UPS = 3
EXTENSION = 1024
BRANCHES = (0.96, 0.90, 0.79, 0.61)
"""Where the probes of equal retention leave a prompt, in parts of it."""


async def warm_up(server: Server, sizes: Sequence[int], seed: int) -> None:
    """Send three cold prompts of each size."""
    for number in range(WARM_UPS):
        for size in sizes:
            await server.cold(prompt(size, "warm-up", seed, server.name, number))


async def probe(server: Server, sizes: Sequence[int], seed: int, recorder: Recorder) -> None:
    """Cold prompts of each size, then the first one repeated and extended.

    Raises:
        BenchError: A cold prompt hit something, or a warm one nothing.
    """
    prompts = [prompt(size, "probe", seed, server.name) for size in sizes]
    for tokens in prompts:
        answer = await server.cold(tokens)
        recorder.add("probe", arm=server.name, name=f"cold {len(tokens)}", prompt=len(tokens), cached=answer.cached)
    first = prompts[0]
    warm = {"repeated": first, "extended": first + prompt(EXTENSION, "extension", seed)}
    for name, tokens in warm.items():
        answer = await server.client.complete(tokens)
        recorder.add("probe", arm=server.name, name=name, prompt=answer.prompt, cached=answer.cached)
        if not answer.cached:
            raise BenchError(
                f"arm {server.name}: the {name} prompt of {len(first)} tokens found nothing in the prefix cache; "
                "is --enable-prefix-caching on, and a block shorter than the prompt?"
            )


async def probe_equal_retention(server: Server, other: Server, size: int, seed: int, recorder: Recorder) -> None:
    """Branches off one prompt hit at least as deep in a server as in the other one, whose states it must keep.

    Raises:
        BenchError: They do not.
    """
    base = prompt(size, "equal retention", seed, server.name)
    hits = []
    for each in (server, other):
        await each.cold(base)
        answers = [await each.client.complete(branch(base, int(size * part), seed)) for part in BRANCHES]
        hits.append([answer.cached for answer in answers])
        recorder.add("probe", arm=each.name, name=f"branches of {server.name}", prompt=size, cached=hits[-1])
    ours, theirs = hits
    if any(mine < wanted for mine, wanted in zip(ours, theirs, strict=True)):
        raise BenchError(
            f"arm {server.name} does not keep the states of {other.name}: branches hit {ours}, there {theirs}"
        )
