# SPDX-License-Identifier: Apache-2.0
"""Fixed traffic for what random traffic meets seldom: reuse that is missing, and steps that have to fall together."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from tests.traffic.layouts import BLOCK, MAX_MODEL_LEN
from tests.traffic.world import Setting, World
from vllm_kda_prefill.planning import Layout


def check_reuse() -> None:
    """Nothing is missing either: a prompt's checkpoints and a junction are there for whoever leaves it."""
    layout = Layout(attention_block=BLOCK, mamba_block=BLOCK, budget=1024, max_model_len=MAX_MODEL_LEN)
    _leave(World(Setting(layout)), ((470, 448), (400, 384), (310, 256), (330, 288)))


def check_reuse_of_wide_blocks() -> None:
    """The same where an attention block holds four states: whoever leaves a prompt inside a block resumes there."""
    layout = Layout(attention_block=BLOCK, mamba_block=BLOCK, dcp=4, mtp=3, budget=1024, max_model_len=MAX_MODEL_LEN)
    _leave(World(Setting(layout)), ((490, 480), (470, 448), (400, 384), (310, 256), (330, 288)))


def _leave(world: World, hits: tuple[tuple[int, int], ...]) -> None:
    """Serve a prompt of 512 tokens, and others that leave it, each after so many tokens, with the hit to be had."""
    prompt = world.words(512)
    world.arrive(prompt)
    world.drain()
    for leave, cached in hits:
        before = world.counts["hit tokens"]
        world.arrive(prompt[:leave] + world.words(60))
        world.drain()
        assert world.counts["hit tokens"] - before == cached, f"leaving at {leave} should reuse {cached} tokens"


def check_preemption_inside_a_block() -> None:
    """A chunk that ends inside an attention block is preempted in its own step: the block promises nothing more."""
    for num_blocks, length in itertools.product(range(9, 14), (61, 62)):
        layout = Layout(
            attention_block=BLOCK,
            mamba_block=BLOCK,
            dcp=2,
            budget=4 * BLOCK,
            num_blocks=num_blocks,
            long_prefill_threshold=BLOCK,
            scheduling="priority",
            max_model_len=MAX_MODEL_LEN,
        )
        world = World(Setting(layout))
        world.arrive(world.words(14 * BLOCK), 1, 2)
        world.step()
        world.arrive(world.words(length), 8, 0)
        world.drain()


def check_a_decode_is_copied_a_step_late() -> None:
    """A decode reaches a boundary whose state is cached, in the step that admits a prompt which goes on from there.

    The copy for that prompt runs before the decode writes the boundary's last token.
    """
    layout = Layout(attention_block=BLOCK, mamba_block=BLOCK, dcp=2, budget=1024, max_model_len=MAX_MODEL_LEN)
    hits = []
    for late in range(-2, 3):
        world = World(Setting(layout))
        text = world.words(BLOCK + 20)
        world.arrive(text)
        world.drain()
        world.evict(attention=True)
        # The state after `BLOCK` tokens is left. The decode begins some tokens before it.
        decoding = world.arrive(text[: BLOCK - 4], BLOCK)
        world.texts[decoding][BLOCK - 4 : len(text)] = text[BLOCK - 4 :]
        for _ in range(4 + late):
            world.step()
        before = world.counts["hit tokens"]
        world.arrive(text + world.words(60))
        world.drain()
        hits.append(world.counts["hit tokens"] - before)
    assert hits[0] == 0, "a prompt that comes before the boundary finds nothing"
    assert hits[-1] == BLOCK, "a prompt that comes after it finds the boundary"


SCENES: tuple[Callable[[], None], ...] = (
    check_reuse,
    check_reuse_of_wide_blocks,
    check_preemption_inside_a_block,
    check_a_decode_is_copied_a_step_late,
)
