# SPDX-License-Identifier: Apache-2.0
"""Hostile traffic as a Hypothesis state machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.traffic.layouts import (
    BLOCK,
    LONGEST_REAL,
    REAL_BLOCK,
    crowded_layouts,
    crowded_wide_layouts,
    fine_layouts,
    layouts,
    real_size_layouts,
    wide_layouts,
)
from tests.traffic.world import Setting, World
from vllm_kda_prefill.planning import Arm


def scaled(low: int, high: int) -> st.SearchStrategy[int]:
    """Tokens up to `high`, or as many more as the machine's blocks are larger than 32 tokens."""
    return st.runner().flatmap(lambda machine: st.integers(low, high * machine.block // BLOCK))


def _lengths(machine: Traffic) -> st.SearchStrategy[int]:
    block, longest = machine.block, machine.longest
    return st.one_of(
        st.integers(1, 3 * block + 4),
        st.integers(5 * block, longest),
        st.builds(lambda blocks, off: blocks * block + off, st.integers(2, longest // block), st.integers(-2, 5)),
    )


lengths = st.runner().flatmap(_lengths)
outputs = st.sampled_from((1, 2, 5, 20, 45))
priorities = st.integers(0, 2)
seldom = st.integers(0, 3).map(lambda number: number == 3)
places = st.integers(0, 10**6)
"""An index that is taken modulo the number of choices at hand."""


class Traffic(RuleBasedStateMachine):
    """Random traffic on one engine. Every check is made by the world, after each step."""

    arm: ClassVar[Arm] = "coalesced"
    block: ClassVar[int] = BLOCK
    longest: ClassVar[int] = 1280
    """Tokens of the longest prompt that shares nothing."""
    attention_blocks: ClassVar[Sequence[int]] = (BLOCK, BLOCK, BLOCK // 2, 2 * BLOCK)
    engines: ClassVar[Any] = staticmethod(layouts)
    totals: ClassVar[Any] = None
    """A Counter that sums what all examples did, if set."""

    world: World

    @initialize(
        data=st.data(),
        policy=st.sampled_from(("ladder", "ladder", "replay")),
        asynchronous=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def start(self, data: st.DataObject, policy: Any, asynchronous: bool, seed: int) -> None:
        layout = data.draw(self.engines(self.attention_blocks))
        self.world = World(Setting(layout, self.arm, policy, asynchronous, seed))

    def _known(self, place: int) -> list[int]:
        texts = list(self.world.texts.values())
        return texts[place % len(texts)]

    has_texts = precondition(lambda self: self.world.texts)
    has_live = precondition(lambda self: self.world.live)

    @rule(length=lengths, outputs=outputs, priority=priorities)
    def arrive(self, length: int, outputs: int, priority: int) -> None:
        self.world.arrive(self.world.words(length), outputs, priority)

    @has_texts
    @rule(place=places, outputs=outputs, priority=priorities)
    def repeat(self, place: int, outputs: int, priority: int) -> None:
        self.world.arrive(list(self._known(place)), outputs, priority)

    @has_texts
    @rule(place=places, at=places, off=st.integers(-1, 4), added=lengths, outputs=outputs, priority=priorities)
    def branch(self, place: int, at: int, off: int, added: int, outputs: int, priority: int) -> None:
        """Leave a known text near a block boundary or anywhere."""
        text = self._known(place)
        leave = at % len(text) + 1
        if at % 3:
            leave = leave // self.block * self.block + off
        self.world.arrive(text[: max(leave, 0)] + self.world.words(added), outputs, priority)

    @has_texts
    @rule(place=places, count=st.integers(2, 3), shared=scaled(0, 300), added=scaled(1, 100))
    def burst(self, place: int, count: int, shared: int, added: int) -> None:
        """Prompts for the same step: a known text, more that they share, and then each its own way."""
        text = self._known(place) + self.world.words(shared)
        for tail in range(count):
            self.world.arrive(text + self.world.words(added + 7 * tail), 1)

    @rule(length=scaled(4 * BLOCK, 20 * BLOCK), urgent=st.lists(scaled(1, 2 * BLOCK), min_size=1, max_size=4))
    def crowd(self, length: int, urgent: list[int]) -> None:
        """While a long prompt of no importance is computed, short urgent ones come and go on for long."""
        self.world.arrive(self.world.words(length), 1, 2)
        self.world.step()
        for tokens in urgent:
            self.world.arrive(self.world.words(tokens), 45, 0)
        for _ in range(12):
            self.world.step()

    @has_texts
    @rule(place=places, added=lengths, outputs=outputs)
    def go_on(self, place: int, added: int, outputs: int) -> None:
        """The next turn of a conversation: a known text, answer included, and more."""
        self.world.arrive(self._known(place) + self.world.words(added), outputs)

    @has_texts
    @rule(place=places, at=places, outputs=outputs)
    def render_again(self, place: int, at: int, outputs: int) -> None:
        """One token in the middle differs, as where a template renders a date."""
        text = list(self._known(place))
        text[at % len(text)] ^= 1
        self.world.arrive(text, outputs)

    @rule(count=st.integers(2, 4), length=lengths)
    def storm(self, count: int, length: int) -> None:
        """Prompts that evict everything else."""
        for _ in range(count):
            self.world.arrive(self.world.words(length + 200))

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @rule()
    def run_oldest(self) -> None:
        self.world.run_oldest()

    @has_live
    @rule(place=places)
    def abort(self, place: int) -> None:
        live = self.world.live
        self.world.abort(live[place % len(live)])

    @rule(now=seldom, preempt=st.booleans())
    def reset(self, now: bool, preempt: bool) -> None:
        if now:
            self.world.reset_prefix_cache(preempt)

    @rule(attention=st.booleans())
    def evict(self, attention: bool) -> None:
        """One kind of block lives longer than the other."""
        self.world.evict(attention)

    @has_texts
    @rule(place=places, shared=scaled(0, 300), added=scaled(1, 100))
    def go_on_without_attention(self, place: int, shared: int, added: int) -> None:
        """A known text's attention blocks are gone, its states are not, and several prompts go on from it."""
        self.world.drain()
        self.world.evict(attention=True)
        self.burst(place, 2, shared, added)

    @precondition(lambda self: self.world.layout.mtp)
    @rule(tokens=st.integers(1, 2), outputs=outputs)
    def slip_in(self, tokens: int, outputs: int) -> None:
        """A prompt of next to nothing, while another request decodes and nobody prefills."""
        self.world.drain()
        self.world.arrive(self.world.words(BLOCK), 45)
        for _ in range(3):
            self.world.step()
        self.world.arrive(self.world.words(tokens), outputs)

    @rule(now=seldom)
    def drain(self, now: bool) -> None:
        if now:
            self.world.drain()

    def teardown(self) -> None:
        if hasattr(self, "world") and not self.world.broken:
            self.world.drain()
            if self.totals is not None:
                self.totals.update(self.world.counts, engines=1)


class StockTraffic(Traffic):
    """The same traffic on stock's scheduler."""

    arm = "stock"
    # Stock's blocks are equally long: it lengthens the attention block until it is as large as a state.
    attention_blocks = (BLOCK,)


class CrowdedTraffic(Traffic):
    """Traffic on pools that hold one or two requests."""

    engines = staticmethod(crowded_layouts)


class CrowdedWideTraffic(Traffic):
    """Traffic on wide attention blocks in pools that hold one or two requests."""

    engines = staticmethod(crowded_wide_layouts)


class WideTraffic(Traffic):
    """Traffic on wide attention blocks."""

    engines = staticmethod(wide_layouts)


class FineTraffic(Traffic):
    """Traffic on Mamba blocks that are wider than the others."""

    engines = staticmethod(fine_layouts)

    @rule(blocks=st.integers(1, 6), added=st.integers(1, 400))
    def go_on_inside_a_block(self, blocks: int, added: int) -> None:
        """A prompt that ends inside a Mamba block, and one that goes on from there."""
        text = self.world.words(blocks * BLOCK + BLOCK // 2 + 5)
        self.world.drain()
        self.world.arrive(text)
        self.world.drain()
        self.world.arrive(text + self.world.words(added))


class RealSizeTraffic(Traffic):
    """Traffic at the real sizes: blocks of 512 tokens, steps of 8,192, prompts of up to 40,000."""

    engines = staticmethod(real_size_layouts)
    block = REAL_BLOCK
    longest = LONGEST_REAL


class StockPlainTraffic(StockTraffic):
    """Traffic on stock's scheduler where its faults cannot show: no wide blocks, priorities or drafts."""

    engines = staticmethod(
        lambda blocks: layouts(blocks).map(
            lambda engine: replace(engine, dcp=1, mtp=0, block_drop=False, scheduling="fcfs")
        )
    )


class StockCrowdedTraffic(StockTraffic):
    """Crowded traffic on stock's scheduler."""

    engines = staticmethod(crowded_layouts)


class StockWideTraffic(StockTraffic):
    """Wide traffic on stock's scheduler."""

    engines = staticmethod(wide_layouts)


MACHINES: tuple[type[Traffic], ...] = (Traffic, CrowdedTraffic, CrowdedWideTraffic, WideTraffic, FineTraffic)
