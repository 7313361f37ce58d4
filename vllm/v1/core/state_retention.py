# SPDX-License-Identifier: Apache-2.0
"""Which recurrent states a prefill retains: plain arithmetic over token counts.

Two questions, one type each:

- where can a prefix-cache lookup resume at all: `LookupGrid`
- which states of a prompt are worth keeping, and which of them does one query export: `Retention`

All positions and sizes are absolute token counts. A position `p` names the state after exactly `p` tokens. The
words (tail, junction, protected) are those of the glossary in docs/design.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from vllm.v1.core.prefill_plan import CHECKPOINT_ALIGNMENT, MAX_CHECKPOINTS

Policy = Literal["ladder", "replay"]
POLICIES: tuple[str, ...] = get_args(Policy)


@dataclass(frozen=True)
class LookupGrid:
    """Where vLLM's prefix-cache lookup can resume a prompt of a hybrid model.

    A hit is the shortest over all KV cache groups. Full attention answers for multiples of `attention_step`
    tokens, and for one more boundary: the prompt's own tail.

    Attributes:
        mamba_block: Tokens of one Mamba block.
        attention_step: Stock's attention answers for whole blocks: the tokens of one over all context-parallel
            ranks (the LCM where groups differ). With this fork's names inside a block it is `hit_alignment`.
        hit_alignment: Every hit is a multiple of this: the hash block with fine-grained hits, else the
            scheduler block.
        scheduler_block: LCM of all groups' block sizes.
        hash_lookahead: Tokens past a block that its hash covers (MTP without the block drop).
        drop_block: Whether a hit gives back its last unit (EAGLE and MTP without lookahead hashes).
    """

    mamba_block: int
    attention_step: int
    hit_alignment: int
    scheduler_block: int
    hash_lookahead: int = 0
    drop_block: bool = False

    def __post_init__(self) -> None:
        for name in ("mamba_block", "attention_step", "hit_alignment", "scheduler_block"):
            size = getattr(self, name)
            if size <= 0 or size % CHECKPOINT_ALIGNMENT:
                raise ValueError(f"{name} must be a positive multiple of {CHECKPOINT_ALIGNMENT} tokens, got {size}")

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
        """How far reachable positions lie below whole attention blocks.

        A lookup that drops its last unit (`drop_block`) still finds the whole attention block and gives back one
        `hit_alignment`: with attention blocks of 2,048 tokens and hits on 512, it ends at 1,536, 3,584, ...
        """
        return self.hit_alignment if self.drop_block and self.hit_alignment < self.attention_step else 0

    @property
    def _step(self) -> int:
        """Reachable positions are multiples of this: whole Mamba blocks wherever the drop allows it."""
        step = math.lcm(self.mamba_block, self.hit_alignment)
        return step if self._residue % math.gcd(step, self.attention_step) == 0 else self.hit_alignment

    def is_reachable(self, position: int, num_tokens: int) -> bool:
        """Whether a lookup can return the state at `position` of a prompt of `num_tokens` tokens."""
        proof = self.hit_alignment if self.drop_block else self.hash_lookahead
        if not 0 < position <= num_tokens - proof:
            return False
        if position == self.tail(num_tokens):
            return True
        return position % self._step == 0 and (position + self._residue) % self.attention_step == 0

    def floor(self, position: int) -> int:
        """The deepest position at or below `position` that is reachable for every prompt going past it."""
        position -= position % self._step
        while position > 0 and (position + self._residue) % self.attention_step:
            position -= self._step
        return max(position, 0)


@dataclass(frozen=True)
class WantedState:
    """A state worth retaining.

    Attributes:
        position: Token count.
        protected: Whether its block may push any entry out of the prefix cache, as a block of stock's may. The
            prompt's tail and a shared-prefix junction are protected; every other state is probationary.
    """

    position: int
    protected: bool


@dataclass(frozen=True)
class Retention:
    """Which states of a prompt are retained.

    Attributes:
        grid: Where lookups can resume.
        policy: `ladder` keeps states at doubling distances from the prompt's end; `replay` keeps the last
            two boundaries of the Mamba block grid and of the scheduler grid.
        interval: vLLM's `prefix_cache_retention_interval`; `N > 0` also keeps multiples of `N`.
    """

    grid: LookupGrid
    policy: Policy = "ladder"
    interval: int | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"unknown retention policy {self.policy!r}; choose one of {', '.join(POLICIES)}")
        if self.interval is not None and self.interval < 0:
            raise ValueError(f"retention interval {self.interval} is negative; use 0, a multiple of the block or None")

    def checkpoint_positions(self, prompt_tokens: int) -> tuple[int, ...]:
        """States kept of a prompt of `prompt_tokens` tokens, sorted; logarithmically many under `ladder`.

        `ladder`: with `E` the block boundary above the prompt's last reusable block, `E - block * 2**k` for
        `k = 0, 1, ...`, each lowered to where a lookup can return it. A follow-up request that leaves the
        prompt at `d` then recomputes at most `2 * (prompt_tokens - d) + block` tokens of this prompt, plus
        one attention block where that is larger than a Mamba block.
        """
        if self.policy == "replay":
            return self._replay(prompt_tokens)
        tail = self.grid.tail(prompt_tokens)
        if tail <= 0:
            return ()
        block = self.grid.mamba_block
        end = self.grid.last_boundary(prompt_tokens, block) + block
        kept = {tail}
        distance = 2 * block
        while distance < end:
            kept.add(self.grid.floor(end - distance))
            distance *= 2
        return tuple(sorted(position for position in kept if 0 < position <= tail))

    def _replay(self, prompt_tokens: int) -> tuple[int, ...]:
        kept = set()
        for unit in (self.grid.mamba_block, self.grid.scheduler_block):
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
            shallowest checkpoint positions are left out first.
        """
        taken = set(exported)
        tail = self.grid.tail(prompt_tokens)
        junction = self.junction(shared_prefix, prompt_tokens)
        states: list[WantedState] = []
        for position in self._in_order(prompt_tokens, start, end, tail, junction):
            if len(taken) == MAX_CHECKPOINTS:
                break
            if start < position < end and position not in taken and (position - start) % CHECKPOINT_ALIGNMENT == 0:
                taken.add(position)
                states.append(WantedState(position, protected=position in (tail, junction)))
        return states

    def _in_order(self, prompt_tokens: int, start: int, end: int, tail: int, junction: int) -> Iterator[int]:
        yield from (tail, junction)
        yield from reversed(self.checkpoint_positions(prompt_tokens))
        if self.interval:
            last = min(end, tail)
            yield from range(last - last % self.interval, start, -self.interval)

    def end_state(self, prompt_tokens: int, end: int, shared_prefix: int = 0) -> WantedState | None:
        """The state at a span's end, which costs no export, if it is worth retaining."""
        tail = self.grid.tail(prompt_tokens)
        junction = self.junction(shared_prefix, prompt_tokens)
        if end in (tail, junction):
            return WantedState(end, protected=True)
        on_interval = self.interval and end < tail and end % self.interval == 0
        if on_interval or end in self.checkpoint_positions(prompt_tokens):
            return WantedState(end, protected=False)
        return None
