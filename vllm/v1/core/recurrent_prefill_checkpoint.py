# SPDX-License-Identifier: Apache-2.0
"""Which recurrent states a prefill retains: arithmetic over token counts, no torch and no vLLM.

Three questions, one type each:

- where can a prefix-cache lookup resume at all: `LookupGrid`
- which states of a prompt are worth keeping, and which of them does one query export: `Retention`
- what does one query export, exactly: `PrefillPlan`, and with its pages `BoundPlan`

All positions and sizes are absolute token counts. A position `p` names the state after exactly `p` tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

CHUNK_TOKENS = 16
"""Tokens in one chunk of the KDA prefill kernels, which can emit a state between two chunks only."""

MAX_CHECKPOINTS = 4
"""States one query can export besides its final one."""

PLANS_ATTRIBUTE = "kda_prefill_plans"
"""Where a scheduler output carries its plans: request id -> `BoundPlan`, exporting requests only."""

Policy = Literal["ladder", "replay"]
POLICIES: tuple[str, ...] = get_args(Policy)


@dataclass(frozen=True)
class PrefillPlan:
    """The states that the query span `[start, end)` exports while it is computed.

    Attributes:
        start: First token of the query span.
        end: One past its last token.
        positions: One to four sorted unique token counts strictly inside the span, each a whole number of
            chunks after `start`.

    Raises:
        ValueError: The plan breaks one of these rules; the message names the value.
    """

    start: int
    end: int
    positions: tuple[int, ...]

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check the rules above, also for a plan that another process sent: unpickling does not.

        Raises:
            ValueError: As for the class.
        """
        if not isinstance(self.positions, tuple):
            raise ValueError(f"checkpoint positions are a tuple, got {self.positions!r}")
        values = (self.start, self.end, *self.positions)
        if any(type(value) is not int for value in values):
            raise ValueError(f"a prefill plan holds plain integers, got {values}")
        if not 0 <= self.start < self.end:
            raise ValueError(f"query span [{self.start}, {self.end}) is empty or starts below 0")
        if not 1 <= len(self.positions) <= MAX_CHECKPOINTS:
            raise ValueError(
                f"a query exports 1 to {MAX_CHECKPOINTS} checkpoints, got {len(self.positions)}: {self.positions}"
            )
        if any(low >= high for low, high in zip(self.positions, self.positions[1:], strict=False)):
            raise ValueError(f"checkpoint positions must be sorted and unique, got {self.positions}")
        for position in self.positions:
            if not self.start < position < self.end:
                raise ValueError(
                    f"checkpoint position {position} is not inside the query span [{self.start}, {self.end})"
                )
            if (position - self.start) % CHUNK_TOKENS:
                raise ValueError(
                    f"checkpoint position {position} is not a multiple of {CHUNK_TOKENS} tokens "
                    f"after the query start {self.start}"
                )

    @property
    def offsets(self) -> tuple[int, ...]:
        """Positions relative to the query start."""
        return tuple(position - self.start for position in self.positions)


@dataclass(frozen=True)
class BoundPlan(PrefillPlan):
    """A plan whose every position owns one page in each Mamba KV cache group.

    Attributes:
        pages: KV cache group id -> page (block id) of each position, in the order of `positions`. Page 0 is
            vLLM's null block and never a destination; no page appears twice.
    """

    pages: Mapping[int, tuple[int, ...]]

    def check(self) -> None:
        super().check()
        if not isinstance(self.pages, Mapping) or not self.pages:
            raise ValueError(f"a bound plan needs the pages of at least one KV cache group, got {self.pages!r}")
        seen: set[int] = set()
        for group, pages in self.pages.items():
            if type(group) is not int or not isinstance(pages, tuple):
                raise ValueError(f"a bound plan maps KV cache groups to tuples of pages, got {group!r}: {pages!r}")
            if len(pages) != len(self.positions):
                raise ValueError(
                    f"KV cache group {group} has {len(pages)} pages for {len(self.positions)} checkpoint positions"
                )
            for page in pages:
                if type(page) is not int or page <= 0 or page in seen:
                    raise ValueError(f"KV cache group {group}: page {page!r} is not a page of its own")
                seen.add(page)


@dataclass(frozen=True)
class LookupGrid:
    """Where vLLM's prefix-cache lookup can resume a prompt of a hybrid model.

    A hit is the shortest over all KV cache groups. Full attention answers for whole blocks of
    `attention_block` tokens, and for one more boundary inside a block: the prompt's own tail.

    Attributes:
        page: Tokens of one Mamba page.
        attention_block: Tokens of one full-attention block over all context-parallel ranks (the LCM where
            groups differ).
        hit_alignment: Every hit is a multiple of this: the hash block with fine-grained hits, else the
            scheduler block.
        scheduler_block: LCM of all groups' block sizes.
        hash_lookahead: Tokens past a block that its hash covers (MTP without the block drop).
        drop_block: Whether a hit gives back its last unit (EAGLE and MTP without lookahead hashes).
    """

    page: int
    attention_block: int
    hit_alignment: int
    scheduler_block: int
    hash_lookahead: int = 0
    drop_block: bool = False

    def __post_init__(self) -> None:
        for name in ("page", "attention_block", "hit_alignment", "scheduler_block"):
            size = getattr(self, name)
            if size <= 0 or size % CHUNK_TOKENS:
                raise ValueError(f"{name} must be a positive multiple of {CHUNK_TOKENS} tokens, got {size}")

    def last_boundary(self, num_tokens: int, unit: int) -> int:
        """The deepest multiple of `unit` that a repeat of a prompt of `num_tokens` tokens can resume at.

        At least one token is left to compute, and as many as the hash of the boundary looks ahead. The rule
        is stock vLLM's `get_mamba_prefill_checkpoint_position`; a test compares the two.
        """
        if self.drop_block:
            boundary = num_tokens // unit * unit - unit
        else:
            boundary = (num_tokens - max(1, self.hash_lookahead)) // unit * unit
        return max(boundary, 0)

    def tail(self, num_tokens: int) -> int:
        """The deepest state of a prompt that a lookup can return; 0 if it has none."""
        return self.last_boundary(num_tokens, self.hit_alignment)

    @property
    def _residue(self) -> int:
        """What reachable positions leave over a whole number of attention blocks, as a distance below one."""
        return self.hit_alignment if self.drop_block and self.hit_alignment < self.attention_block else 0

    @property
    def _step(self) -> int:
        """Reachable positions are multiples of this: whole pages wherever the drop allows it."""
        page = math.lcm(self.page, self.hit_alignment)
        return page if self._residue % math.gcd(page, self.attention_block) == 0 else self.hit_alignment

    def is_reachable(self, position: int, num_tokens: int) -> bool:
        """Whether a lookup can return the state at `position` of a prompt of `num_tokens` tokens."""
        proof = self.hit_alignment if self.drop_block else self.hash_lookahead
        if not 0 < position <= num_tokens - proof:
            return False
        if position == self.tail(num_tokens):
            return True
        return position % self._step == 0 and (position + self._residue) % self.attention_block == 0

    def floor(self, position: int) -> int:
        """The deepest position at or below `position` that is reachable for every prompt going past it."""
        position -= position % self._step
        while position > 0 and (position + self._residue) % self.attention_block:
            position -= self._step
        return max(position, 0)


@dataclass(frozen=True)
class WantedState:
    """A state worth retaining.

    Attributes:
        position: Token count.
        first_class: Whether its page may push a first-class entry out of the prefix cache, as a page of
            stock's may. The prompt's tail and a shared-prefix junction are first class.
    """

    position: int
    first_class: bool


@dataclass(frozen=True)
class Retention:
    """Which states of a prompt are retained.

    Attributes:
        grid: Where lookups can resume.
        policy: `ladder` keeps states at doubling distances from the prompt's end; `replay` keeps the last
            two boundaries of the page grid and of the scheduler grid.
        interval: vLLM's `prefix_cache_retention_interval`; `N > 0` also keeps multiples of `N`.
    """

    grid: LookupGrid
    policy: Policy = "ladder"
    interval: int | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"unknown retention policy {self.policy!r}; choose one of {', '.join(POLICIES)}")
        if self.interval is not None and self.interval < 0:
            raise ValueError(f"retention interval {self.interval} is negative; use 0, a page multiple or None")

    def rungs(self, prompt_tokens: int) -> tuple[int, ...]:
        """States kept of a prompt of `prompt_tokens` tokens, sorted; logarithmically many under `ladder`.

        `ladder`: with `E` the page boundary above the prompt's last reusable page, `E - page * 2**k` for
        `k = 0, 1, ...`, each lowered to where a lookup can return it. A follow-up request that leaves the
        prompt at `d` then recomputes at most `2 * (prompt_tokens - d) + page` tokens of this prompt, plus
        one attention block where that is larger than a page.
        """
        if self.policy == "replay":
            return self._replay(prompt_tokens)
        tail = self.grid.tail(prompt_tokens)
        if tail <= 0:
            return ()
        page = self.grid.page
        end = self.grid.last_boundary(prompt_tokens, page) + page
        kept = {tail}
        distance = 2 * page
        while distance < end:
            kept.add(self.grid.floor(end - distance))
            distance *= 2
        return tuple(sorted(position for position in kept if 0 < position <= tail))

    def _replay(self, prompt_tokens: int) -> tuple[int, ...]:
        kept = set()
        for unit in (self.grid.page, self.grid.scheduler_block):
            boundary = self.grid.last_boundary(prompt_tokens, unit)
            kept |= {boundary, boundary - unit}
        return tuple(sorted(position for position in kept if 0 < position < prompt_tokens))

    def junction(self, boundary: int, prompt_tokens: int) -> int:
        """Where the state of a shared prefix of `boundary` tokens goes; 0 if there is no such place."""
        if boundary <= 0:
            return 0
        tail = self.grid.tail(prompt_tokens)
        return tail if boundary == tail else self.grid.floor(boundary)

    def wanted(
        self, prompt_tokens: int, start: int, end: int, shared_prefix: int = 0, exported: Iterable[int] = ()
    ) -> list[WantedState]:
        """States that the query span `[start, end)` should export, the most wanted first.

        Args:
            prompt_tokens: Length of the whole prompt.
            start: First token of the query span.
            end: One past its last token.
            shared_prefix: Tokens of a prefix shared with other prompts whose state is not cached yet, or 0.
            exported: Positions that the span exports anyhow; they count towards the four.

        Returns:
            At most four states with `exported`, all strictly inside the span. Where more are wanted, the
            shallowest rungs are left out first.
        """
        taken = set(exported)
        tail = self.grid.tail(prompt_tokens)
        junction = self.junction(shared_prefix, prompt_tokens)
        states: list[WantedState] = []
        for position in self._in_order(prompt_tokens, start, end, tail, junction):
            if len(taken) == MAX_CHECKPOINTS:
                break
            if start < position < end and position not in taken and (position - start) % CHUNK_TOKENS == 0:
                taken.add(position)
                states.append(WantedState(position, first_class=position in (tail, junction)))
        return states

    def _in_order(self, prompt_tokens: int, start: int, end: int, tail: int, junction: int) -> Iterator[int]:
        yield from (tail, junction)
        yield from reversed(self.rungs(prompt_tokens))
        if self.interval:
            last = min(end, tail)
            yield from range(last - last % self.interval, start, -self.interval)

    def end_state(self, prompt_tokens: int, end: int, shared_prefix: int = 0) -> WantedState | None:
        """The state at a span's end, which costs no export, if it is worth retaining."""
        tail = self.grid.tail(prompt_tokens)
        junction = self.junction(shared_prefix, prompt_tokens)
        if end in (tail, junction):
            return WantedState(end, first_class=True)
        if end in self.rungs(prompt_tokens) or (self.interval and end < tail and end % self.interval == 0):
            return WantedState(end, first_class=False)
        return None
