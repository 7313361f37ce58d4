# SPDX-License-Identifier: Apache-2.0
"""Which block sizes of a hybrid model's KV cache work: arithmetic and words, without torch or an engine.

Attention layers and recurrent layers have a block size each, counted in tokens of one rank. Two settings give them.
This file reads the settings, lists the pairs that `auto` chooses from, and says what is wrong with a size. What a pair
costs is measured in `cache_capacity`. `block_layout` of the plugin decides and refuses.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

from vllm.kda_prefill_variables import SPLIT_MAMBA, SPLIT_TARGET
from vllm.v1.core.prefill_plan import CHECKPOINT_ALIGNMENT, MAX_CHECKPOINTS

SPAN_TOKENS = 8192
"""The query span that coalescing is made for: one step's budget of prompt tokens."""

MLA_UNIT = 128
"""MLA decode kernels take blocks in multiples of this. It is a multiple of the checkpoint alignment too."""

MOST_DIGITS = 18
"""Digits of a setting's value; a longer one is no number of tokens."""

assert MLA_UNIT % CHECKPOINT_ALIGNMENT == 0

AUTO: Literal["auto"] = "auto"
Size = int | Literal["auto"]

SETTINGS = (SPLIT_TARGET, SPLIT_MAMBA)
"""The variables that give the attention and the Mamba block size."""


class BlockSizes(NamedTuple):
    """Tokens of an attention block on one rank, and of a Mamba block."""

    attention: int
    mamba: int

    def __str__(self) -> str:
        return f"{self.attention}/{self.mamba}"


class BlockSettings(NamedTuple):
    """What the two settings say: a number of tokens, or `auto`."""

    attention: Size
    mamba: Size

    def given(self) -> tuple[int | None, int | None]:
        """Both sizes; None for one that is to be chosen."""
        return (None if self.attention == AUTO else self.attention), (None if self.mamba == AUTO else self.mamba)

    def choices(self, unit: int) -> list[BlockSizes]:
        """The pairs that the settings leave to choose from; both sizes given are the only one.

        Args:
            unit: Tokens that an attention block must be a multiple of.
        """
        attention, mamba = self.given()
        if attention is not None and mamba is not None:
            return [BlockSizes(attention, mamba)]
        return candidates(unit, attention, mamba)

    def problems(self, unit: int, names: tuple[str, str] = SETTINGS) -> Iterator[str]:
        """Why an engine cannot use these sizes.

        Args:
            unit: Tokens that an attention block must be a multiple of.
            names: What the user calls the attention and the recurrent size.
        """
        for name, size in zip(names, self.given(), strict=True):
            if size is not None and size % unit:
                yield (
                    f"{name}={size} is not a multiple of {unit} tokens, which this engine's attention kernels need; "
                    f"{_nearest(size, unit)}"
                )
                return
        yield from self.ratio_problems(names)
        if not self.choices(unit):
            every = ", ".join(map(str, candidates(unit))) or "none"
            yield (
                f"{names[0]}={self.attention} and {names[1]}={self.mamba} leave no pair to choose that keeps "
                f"{SPAN_TOKENS:,}-token spans coalesced; those that do: {every}"
            )

    def ratio_problems(self, names: tuple[str, str] = SETTINGS) -> Iterator[str]:
        """Why no engine at all can use these sizes beside each other."""
        attention, mamba = self.given()
        if attention is not None and mamba is not None and mamba % attention:
            yield f"{names[1]}={mamba} is not a multiple of {names[0]}={attention}; {_nearest(mamba, attention)}"

    def contradictions(self, block_size: int, attention_blocks: Collection[int]) -> Iterator[str]:
        """Why `--block-size` cannot stand beside attention blocks of one of these numbers of tokens."""
        if block_size not in attention_blocks:
            sizes = " or ".join(map(str, sorted(attention_blocks)))
            yield (
                f"--block-size {block_size} contradicts {SPLIT_TARGET}={self.attention}, which makes blocks of {sizes} "
                "tokens: leave one out"
            )


def read_size(text: str | None) -> Size | None:
    """The block size in a setting's value: None where there is none, 0 where it is no usable size."""
    if not text:
        return None
    if text == AUTO:
        return AUTO
    size = _number(text)
    return size if size % MLA_UNIT == 0 else 0


def value_problems(name: str, text: str | None) -> Iterator[str]:
    """What is wrong with a setting's value, whatever the engine."""
    if text and read_size(text) == 0:
        nearest = _nearest(_number(text), MLA_UNIT)
        yield f"{name}={text!r} is neither auto nor a positive multiple of {MLA_UNIT} tokens; {nearest}"


def _number(text: str) -> int:
    # Python refuses to read numbers of thousands of digits, in words of its own.
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS else 0


def too_coarse(mamba_block: int, unit: int) -> Iterator[str]:
    """Why Mamba blocks of `mamba_block` tokens leave coalescing too little to do.

    Args:
        mamba_block: Tokens of a Mamba block.
        unit: Tokens that an attention block must be a multiple of.
    """
    if not forms_8k_path(mamba_block):
        yield (
            f"Mamba blocks of {mamba_block} tokens leave {boundaries_inside(mamba_block)} boundaries inside a span "
            f"of {SPAN_TOKENS} tokens, which retains up to {MAX_CHECKPOINTS} states: {hint(unit)}"
        )


def hint(unit: int) -> str:
    """What to set where the block size is too coarse."""
    finest = candidates(unit)[:1]
    sizes = f"to {finest[0].attention} and {finest[0].mamba}, or to auto" if finest else "to smaller blocks"
    return f"set {SPLIT_TARGET} and {SPLIT_MAMBA} {sizes}"


def nearest_multiples(value: int, unit: int) -> tuple[int, ...]:
    """The positive multiples of `unit` next to `value`, `value` alone if it is one."""
    if value > 0 and value % unit == 0:
        return (value,)
    below = max(value, 0) // unit * unit
    return tuple(size for size in (below, below + unit) if size > 0)


def _nearest(size: int, unit: int) -> str:
    sizes = nearest_multiples(size, unit)
    return f"the nearest that work are {sizes[0]} and {sizes[1]}" if len(sizes) == 2 else f"the nearest is {sizes[0]}"


def boundaries_inside(mamba_block: int) -> int:
    """Block boundaries strictly inside a span of `SPAN_TOKENS` tokens that starts on one."""
    return (SPAN_TOKENS - 1) // mamba_block


def forms_8k_path(mamba_block: int) -> bool:
    """Whether one span of `SPAN_TOKENS` tokens has a boundary for each of the states a query can export."""
    return boundaries_inside(mamba_block) >= MAX_CHECKPOINTS


def fills_span(mamba_block: int) -> bool:
    """Whether the spans of a longer prompt use the whole budget: they end on block boundaries."""
    return SPAN_TOKENS % mamba_block == 0


def candidates(unit: int, attention: int | None = None, mamba: int | None = None) -> list[BlockSizes]:
    """Every pair that keeps 8K spans coalesced and whole, the finest first.

    Args:
        unit: Tokens that an attention block must be a multiple of.
        attention: Tokens of the attention block, where it is given.
        mamba: Tokens of the Mamba block, where it is given.
    """
    pairs = [
        BlockSizes(small, large)
        for large in range(unit, SPAN_TOKENS, unit)
        if forms_8k_path(large) and fills_span(large)
        for small in range(unit, large + 1, unit)
        if large % small == 0
    ]
    return [pair for pair in pairs if attention in (None, pair.attention) and mamba in (None, pair.mamba)]


def raised_block(state_bytes: int, bytes_per_token: int, unit: int, block_size: int = 1) -> int:
    """Tokens of the one block size of stock's layout: an attention block is raised until it holds a state.

    The rule is that of stock's `Platform._align_hybrid_block_size`.

    Args:
        state_bytes: Bytes of one layer's recurrent state.
        bytes_per_token: Bytes of one token in one attention layer.
        unit: Tokens that an attention block must be a multiple of.
        block_size: The block size to start from; a larger one is the step of the raise.
    """
    step = math.lcm(max(unit, block_size), CHECKPOINT_ALIGNMENT)
    raised = step * -(-state_bytes // (step * bytes_per_token))
    return unit * -(-raised // unit)
