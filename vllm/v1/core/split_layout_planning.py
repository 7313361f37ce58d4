# SPDX-License-Identifier: Apache-2.0
"""Which page sizes of a hybrid model's KV cache work, and which are best: arithmetic, no torch and no vLLM.

An attention page and a recurrent page are counted in tokens of one rank. What they cost is measured elsewhere
(`hybrid_cache_layout`) and comes in as a function.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from vllm.v1.core.prefill_plan import CHECKPOINT_ALIGNMENT, MAX_CHECKPOINTS

SPAN_TOKENS = 8192
"""The query span that coalescing is made for: one step's budget of prompt tokens."""

MLA_UNIT = 128
"""MLA decode kernels take blocks in multiples of this; it is a multiple of the KDA chunk too."""

assert MLA_UNIT % CHECKPOINT_ALIGNMENT == 0


class PageSizes(NamedTuple):
    """Tokens of an attention page on one rank and of a recurrent page."""

    target: int
    mamba: int


def nearest_multiples(value: int, unit: int) -> tuple[int, ...]:
    """The positive multiples of `unit` next to `value`, `value` alone if it is one."""
    if value > 0 and value % unit == 0:
        return (value,)
    below = max(value, 0) // unit * unit
    return tuple(size for size in (below, below + unit) if size > 0)


def boundaries_inside(page: int) -> int:
    """Page boundaries strictly inside a span of `SPAN_TOKENS` tokens that starts on one."""
    return (SPAN_TOKENS - 1) // page


def forms_8k_path(page: int) -> bool:
    """Whether one span of `SPAN_TOKENS` tokens has a boundary for each of the states a query can export."""
    return boundaries_inside(page) >= MAX_CHECKPOINTS


def fills_span(page: int) -> bool:
    """Whether the spans of a longer prompt use the whole budget: they end on the page grid."""
    return SPAN_TOKENS % page == 0


def candidates(unit: int, target: int | None = None, mamba: int | None = None) -> list[PageSizes]:
    """Every pair that keeps 8K spans coalesced and whole, the finest first.

    Args:
        unit: Tokens that an attention page must be a multiple of.
        target: The attention page, where it is given.
        mamba: The recurrent page, where it is given.
    """
    pairs = [
        PageSizes(small, large)
        for large in range(unit, SPAN_TOKENS, unit)
        if forms_8k_path(large) and fills_span(large)
        for small in range(unit, large + 1, unit)
        if large % small == 0
    ]
    return [pair for pair in pairs if target in (None, pair.target) and mamba in (None, pair.mamba)]


def raised_page(state_bytes: int, bytes_per_token: int, unit: int, block_size: int = 1) -> int:
    """Tokens of the one page size of stock's layout: an attention page is raised until it holds a state.

    Args:
        state_bytes: Bytes of one layer's recurrent state.
        bytes_per_token: Bytes of one token in one attention layer.
        unit: Tokens that an attention page must be a multiple of.
        block_size: The page size to start from; a larger one is the step of the raise.
    """
    step = math.lcm(max(unit, block_size), CHECKPOINT_ALIGNMENT)
    raised = step * -(-state_bytes // (step * bytes_per_token))
    return unit * -(-raised // unit)
