"""Three warm-ups a shape, and five probes that a server counts its hits."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_kda_prefill.bench.errors import BenchError
from vllm_kda_prefill.bench.lanes import Lane
from vllm_kda_prefill.bench.records import Recorder
from vllm_kda_prefill.bench.workloads import branch, prompt

WARM_UPS = 3
EXTENSION = 1024
BRANCHES = (0.96, 0.90, 0.79, 0.61)
"""Where the probes of equal retention leave a prompt, in parts of it."""


async def warm_up(lane: Lane, sizes: Sequence[int], seed: int) -> None:
    """Send three cold prompts of each size."""
    for number in range(WARM_UPS):
        for size in sizes:
            await lane.cold(prompt(size, "warm-up", seed, lane.name, number))


async def probe(lane: Lane, sizes: Sequence[int], seed: int, recorder: Recorder) -> None:
    """Cold prompts of each size, then the first one repeated and extended.

    Raises:
        BenchError: A cold prompt hit something, or a warm one nothing.
    """
    prompts = [prompt(size, "probe", seed, lane.name) for size in sizes]
    for tokens in prompts:
        answer = await lane.cold(tokens)
        recorder.add("probe", arm=lane.name, name=f"cold {len(tokens)}", prompt=len(tokens), cached=answer.cached)
    first = prompts[0]
    warm = {"repeated": first, "extended": first + prompt(EXTENSION, "extension", seed)}
    for name, tokens in warm.items():
        answer = await lane.client.complete(tokens)
        recorder.add("probe", arm=lane.name, name=name, prompt=answer.prompt, cached=answer.cached)
        if not answer.cached:
            raise BenchError(
                f"arm {lane.name}: the {name} prompt of {len(first)} tokens found nothing in the prefix cache; "
                "is --enable-prefix-caching on, and a page shorter than the prompt?"
            )


async def probe_equal_retention(lane: Lane, other: Lane, size: int, seed: int, recorder: Recorder) -> None:
    """Branches off one prompt hit at least as deep in a lane as in the other one, whose states it must keep.

    Raises:
        BenchError: They do not.
    """
    base = prompt(size, "equal retention", seed, lane.name)
    hits = []
    for each in (lane, other):
        await each.cold(base)
        answers = [await each.client.complete(branch(base, int(size * part), seed)) for part in BRANCHES]
        hits.append([answer.cached for answer in answers])
        recorder.add("probe", arm=each.name, name=f"branches of {lane.name}", prompt=size, cached=hits[-1])
    ours, theirs = hits
    if any(mine < wanted for mine, wanted in zip(ours, theirs, strict=True)):
        raise BenchError(
            f"arm {lane.name} does not keep the states of {other.name}: branches hit {ours}, there {theirs}"
        )
