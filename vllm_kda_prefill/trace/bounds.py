# SPDX-License-Identifier: Apache-2.0
"""What a cache could find of recorded prompts at best: without a limit, and with foresight.

Both walk the prompts in their order, one at a time, in units of one Mamba block: a prompt is the list of its
prefixes at every whole number of units. docs/results/traces.md says what the bounds leave out.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_kda_prefill.trace.prompts import Position, Trace


@dataclass(frozen=True, slots=True)
class UnitPrompt:
    """A prompt in units.

    Attributes:
        prefixes: The prefix of 1, 2, ... units; equal prefixes have equal names.
        usable: How many of these a hit may have: a token is left to compute.
        hit: How many of these a cache without limit finds.
    """

    prefixes: tuple[Position, ...]
    usable: int
    hit: int


def in_units(trace: Trace, unit: int, lookahead: int) -> list[UnitPrompt]:
    """The prompts of a trace, with what a cache of no limit that can resume at every unit finds of each.

    Args:
        trace: The prompts.
        unit: Tokens of a unit.
        lookahead: Tokens after a prefix that its hash covers.
    """
    seen: set[Position] = set()
    prompts = []
    for prompt in trace.prompts:
        prefixes = tuple(prompt.positions(unit, lookahead))
        usable = min(len(prefixes), (prompt.tokens - 1) // unit)
        hit = _count_leading(prefixes, usable, seen.__contains__)
        prompts.append(UnitPrompt(prefixes, usable, hit))
        seen.update(prefixes)
    return prompts


def unbounded_tokens(prompts: Sequence[UnitPrompt], unit: int) -> int:
    """Tokens that a cache of no limit, which can resume at every unit, finds."""
    return unit * sum(prompt.hit for prompt in prompts)


def foresight_tokens(
    prompts: Sequence[UnitPrompt], unit: int, num_blocks: int, unit_blocks: float, state_blocks: int
) -> int:
    """Tokens that a cache finds which knows all later prompts: `ForesightCache` over the prompts.

    Args:
        prompts: In units.
        unit: Tokens of a unit.
        num_blocks: Blocks of the cache.
        unit_blocks: Blocks that attention takes for a unit: a part of one, where a block spans several ranks.
        state_blocks: Blocks of one state: one in each KDA group.
    """
    cache = ForesightCache(prompts, num_blocks, unit_blocks, state_blocks)
    return unit * sum(cache.serve(time) for time in range(len(prompts)))


class ForesightCache:
    """A cache that keeps only what is used again, and when it is full drops what is used again last (Belady).

    Attention of a prefix is used again by the next prompt that repeats it. A state is used again by the next prompt
    that parts from all prompts before it right there; a pass keeps as many of these as there are. A state that has no
    such use any more stays only while nothing else wants its blocks, for a prompt that goes on past it. Of what is used
    again at the same time the deepest goes first, a state before the attention it stands on. So what is left of a
    prefix is always its beginning.
    """

    def __init__(self, prompts: Sequence[UnitPrompt], num_blocks: int, unit_blocks: float, state_blocks: int) -> None:
        self._prompts = prompts
        self._num_blocks = num_blocks
        self._attention = _Kind(unit_blocks)
        self._states = _Kind(state_blocks)
        # Time of next use, depth and kind, each negative so that the first to go is the smallest.
        self._order: list[tuple[int, int, int, Position]] = []
        for time, prompt in enumerate(prompts):
            for prefix in prompt.prefixes[: prompt.hit]:
                self._attention.uses.setdefault(prefix, deque()).append(time)
            if prompt.hit:
                self._states.uses.setdefault(prompt.prefixes[prompt.hit - 1], deque()).append(time)

    @property
    def used(self) -> float:
        """Blocks in use."""
        return self._attention.blocks + self._states.blocks

    def serve(self, time: int) -> int:
        """Serve the prompt number `time`; after all before it.

        Returns:
            Units of it that were found.
        """
        prompt = self._prompts[time]
        reach = _count_leading(prompt.prefixes, prompt.usable, self._attention.next_use.__contains__)
        states = self._states.next_use
        hit = next((depth for depth in range(reach, 0, -1) if prompt.prefixes[depth - 1] in states), 0)
        for depth, prefix in enumerate(prompt.prefixes, 1):
            passed = self._attention.next_time(prefix, time)
            self._keep(self._attention, prefix, depth, passed)
            # Only what is computed can be kept anew.
            if depth > hit or prefix in states:
                wanted = self._states.next_time(prefix, time)
                if wanted is None and passed is not None and prefix in states:
                    wanted = passed + len(self._prompts)  # Later than anything: it goes first.
                self._keep(self._states, prefix, depth, wanted)
        while self.used > self._num_blocks:
            self._drop_last_used()
        return hit

    def _keep(self, kind: _Kind, prefix: Position, depth: int, until: int | None) -> None:
        """Keep it until its next use, or drop it where there is none."""
        if until is None:
            kind.next_use.pop(prefix, None)
        elif kind.next_use.get(prefix) != until:
            kind.next_use[prefix] = until
            heapq.heappush(self._order, (-until, -depth, -int(kind is self._states), prefix))

    def _drop_last_used(self) -> None:
        time, _, is_state, prefix = heapq.heappop(self._order)
        kind = self._states if is_state else self._attention
        # Most were used, and put in the order again, since.
        if kind.next_use.get(prefix) == -time:
            del kind.next_use[prefix]


class _Kind:
    """Attention's blocks, or states.

    Attributes:
        uses: Prefix -> times of its uses that are still to come.
        next_use: Prefix -> when it is used next, of all that are in the cache.
    """

    def __init__(self, blocks_each: float) -> None:
        self.uses: dict[Position, deque[int]] = {}
        self.next_use: dict[Position, int] = {}
        self._blocks_each = blocks_each

    def next_time(self, prefix: Position, time: int) -> int | None:
        """When a prefix is used next after `time`; ask in the order of time."""
        uses = self.uses.get(prefix)
        while uses and uses[0] <= time:
            uses.popleft()
        return uses[0] if uses else None

    @property
    def blocks(self) -> float:
        return len(self.next_use) * self._blocks_each


def _count_leading(prefixes: Sequence[Position], most: int, is_there: Callable[[Position], bool]) -> int:
    """How many of the first `most` prefixes are there before the first that is not."""
    return next((index for index in range(most) if not is_there(prefixes[index])), most)
