# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are worth their blocks: cached tokens of conversations that extend and branch, against stock's."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from vllm.v1.core.tiered_free_queue import TieredFreeQueue
from vllm_kda_prefill.planning import Arm, Engine, Layout

BLOCK = 16
"""Tokens of a block here: everything scales with it, and short prompts hash fast."""


def conversations(seed: int, branching: float, turns: int = 150, speakers: int = 8) -> Iterator[tuple[int, list[int]]]:
    """Speaker and prompt of each turn of interleaved conversations over one system prompt.

    A turn extends its conversation; or, with a probability of `branching`, renders it again and so leaves the
    cached prompt at a random point. Long conversations and a few others end, and another takes their place.
    """
    rng = random.Random(seed)

    def words(blocks: int) -> list[int]:
        return [rng.randrange(30_000) for _ in range(rng.randint(BLOCK, blocks * BLOCK))]

    system = words(8)
    history = [system + words(30) for _ in range(speakers)]
    for _ in range(turns):
        speaker = rng.randrange(speakers)
        said = history[speaker]
        if len(said) > 60 * BLOCK or rng.random() < 0.05:
            said = system
        elif rng.random() < branching:
            said = said[: rng.randint(len(said) * 3 // 10, len(said))]
        history[speaker] = said + words(30)
        yield speaker, history[speaker]


def cached_tokens(layout: Layout, arm: Arm, seed: int, branching: float, concurrency: int = 1) -> int:
    """Prompt tokens that first admissions found in the prefix cache over a whole trace.

    A speaker's next turn comes after the answer to the last one; `concurrency` turns run at once.
    """
    engine = Engine.build(layout, arm)
    pending = [(f"{number}", *turn) for number, turn in enumerate(conversations(seed, branching))]
    speaking: dict[str, int] = {}
    seen: set[str] = set()
    cached = 0
    while pending or engine.scheduler.requests:
        speaking = {name: who for name, who in speaking.items() if name in engine.scheduler.requests}
        for turn in list(pending[:20]):
            name, speaker, prompt = turn
            if len(speaking) < concurrency and speaker not in speaking.values():
                pending.remove(turn)
                speaking[name] = speaker
                engine.add(name, prompt)
        output = engine.step()
        for new in output.scheduled_new_reqs:
            if new.req_id not in seen:
                seen.add(new.req_id)
                cached += new.num_computed_tokens
    return cached


@pytest.mark.parametrize("dcp, mtp", [(1, 0), (4, 3)])
@pytest.mark.parametrize("blocks", [120, 250, 800])
def test_cached_tokens_are_not_below_stocks(blocks: int, dcp: int, mtp: int) -> None:
    """From a pool that holds two requests to one that holds a dozen, conversations one turn at a time."""
    layout = Layout(attention_block=BLOCK, mamba_block=BLOCK, dcp=dcp, mtp=mtp, budget=256, num_blocks=blocks)
    stock = [cached_tokens(layout, "stock", seed, branching=0.7) for seed in range(3)]
    coalesced = [cached_tokens(layout, "coalesced", seed, branching=0.7) for seed in range(3)]
    assert sum(coalesced) >= sum(stock)
    assert all(ours >= 0.99 * theirs for ours, theirs in zip(coalesced, stock, strict=True))


@pytest.mark.parametrize("branching", [0.0, 0.35, 0.7])
def test_turns_at_once_lose_next_to_nothing_in_a_tight_pool(branching: float) -> None:
    """Spans past stock's stops take blocks early: only where every other request has room as well.

    Of many traces: single misses throw a pool for two requests about, by 10 % of a trace either way.
    """
    layout = Layout(attention_block=BLOCK, mamba_block=BLOCK, budget=256, num_blocks=120)
    stock = sum(cached_tokens(layout, "stock", seed, branching, concurrency=4) for seed in range(12))
    coalesced = sum(cached_tokens(layout, "coalesced", seed, branching, concurrency=4) for seed in range(12))
    assert coalesced >= 0.98 * stock


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("dcp, mtp", [(1, 0), (4, 3)])
def test_cached_tokens_are_well_above_stocks_with_room(dcp: int, mtp: int, concurrency: int) -> None:
    layout = Layout(attention_block=BLOCK, mamba_block=BLOCK, dcp=dcp, mtp=mtp, budget=256, num_blocks=5000)
    stock = sum(cached_tokens(layout, "stock", seed, 0.7, concurrency) for seed in range(3))
    coalesced = sum(cached_tokens(layout, "coalesced", seed, 0.7, concurrency) for seed in range(3))
    assert coalesced >= 1.15 * stock


def test_protected_checkpoints_would_push_out_better_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What probation is for: where conversations only grow, most checkpoints are never hit."""
    layout = Layout(attention_block=BLOCK, mamba_block=BLOCK, budget=256, num_blocks=400)
    stock = sum(cached_tokens(layout, "stock", seed, branching=0) for seed in range(3))
    assert sum(cached_tokens(layout, "coalesced", seed, branching=0) for seed in range(3)) >= stock
    monkeypatch.setattr(TieredFreeQueue, "mark_probationary", lambda queue, block: None)
    monkeypatch.setattr(TieredFreeQueue, "make_way", lambda queue, count: True)
    assert sum(cached_tokens(layout, "coalesced", seed, branching=0) for seed in range(3)) < 0.98 * stock


def full_cache(blocks: int) -> Engine:
    """An engine with hardly a block but holds the entry of a prompt that nobody comes back to."""
    engine = Engine.build(Layout(attention_block=BLOCK, mamba_block=BLOCK, budget=256, num_blocks=blocks))
    source = random.Random(1)
    for number in range(blocks // 40):
        serve(engine, f"old {number}", [source.randrange(30_000) for _ in range(64 * BLOCK)])
    assert engine.scheduler.kv_cache_manager.eviction.queue.num_probationary <= 2
    return engine


def serve(engine: Engine, name: str, prompt: list[int]) -> int:
    """Serve one prompt to its end; tokens it found in the prefix cache."""
    engine.add(name, prompt)
    cached = 0
    while engine.scheduler.requests:
        cached += sum(new.num_computed_tokens for new in engine.step().scheduled_new_reqs)
    return cached


def test_a_full_cache_learns_that_prompts_branch() -> None:
    """Once checkpoints are missed they take the place of what has not been used for longest."""
    engine = full_cache(blocks=800)
    source = random.Random(2)
    hits = []
    for number in range(12):
        prompt = [source.randrange(30_000) for _ in range(16 * BLOCK)]
        serve(engine, f"base {number}", prompt)
        tails = ([source.randrange(30_000) for _ in range(4 * BLOCK)] for _ in range(3))
        leaves = (14 * BLOCK + 5, 12 * BLOCK + 5, 9 * BLOCK)
        hits.append(
            [serve(engine, f"{number} {at}", prompt[:at] + tail) for at, tail in zip(leaves, tails, strict=True)]
        )
    assert hits[0][0] == 0
    assert hits[-1] == [14 * BLOCK, 12 * BLOCK, 8 * BLOCK]


def test_a_full_cache_keeps_what_is_used_where_nothing_branches() -> None:
    engine = full_cache(blocks=400)
    quota = engine.scheduler.kv_cache_manager.eviction.quota
    prompts = {number: [number] * 40 * BLOCK for number in range(4)}
    for turn in range(20):
        number = turn % 4
        serve(engine, f"{turn}", prompts[number])
        prompts[number] = prompts[number] + [turn] * BLOCK
    assert quota.blocks == 0
