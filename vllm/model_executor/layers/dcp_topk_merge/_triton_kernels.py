# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that pack a rank's candidates and select the best of all ranks; imported on the first call only.

The selection bisects the packed numbers for the `k`-th largest. They differ from each other, so the search ends when
exactly `k` are at or above the middle, at the latest after 64 steps and for scores that are not tied after some 15.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import UNUSED

_PACK_BLOCK = 512
_KEYS_PER_THREAD = 16

_UNUSED = tl.constexpr(UNUSED)


@triton.jit(do_not_specialize=["score_row_stride", "score_col_stride", "id_row_stride", "id_col_stride", "num_cols"])
def _pack_kernel(
    scores,
    local_ids,
    row_starts,
    packed,
    score_row_stride,
    score_col_stride,
    id_row_stride,
    id_col_stride,
    num_cols,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    HAS_ROW_STARTS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < K
    local_id = tl.load(local_ids + row * id_row_stride + place * id_col_stride, mask=inside, other=-1)
    column = local_id
    if HAS_ROW_STARTS:
        column += tl.load(row_starts + row)
    valid = (local_id >= 0) & (column < num_cols)
    offset = row * score_row_stride + column.to(tl.int64) * score_col_stride
    bits = tl.load(scores + offset, mask=valid, other=0.0).to(tl.int32, bitcast=True)

    # Integers only: a comparison of floats may take subnormal numbers for zero.
    magnitude = bits & 0x7FFFFFFF
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(magnitude == 0, 0, order)
    order = tl.where(magnitude > 0x7F800000, -0x7FFFFFFF, order)
    global_id = (local_id // INTERLEAVE * RANKS + RANK) * INTERLEAVE + local_id % INTERLEAVE
    key = (order.to(tl.int64) << 32) | ((~global_id).to(tl.int64) & 0xFFFFFFFF)
    tl.store(packed + row * K + place, tl.where(valid, key, _UNUSED), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "out_row_stride", "out_col_stride"])
def _select_kernel(
    gathered,
    out,
    num_rows,
    out_row_stride,
    out_col_stride,
    K: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK)
    rank = (candidate // K).to(tl.int64)
    key = tl.load(gathered + (rank * num_rows + row) * K + candidate % K, mask=candidate < CANDIDATES, other=_UNUSED)

    # The lowest number that is selected lies in [low, high].
    low = tl.full((), _UNUSED + 1, tl.int64)
    high = low
    valid = tl.sum((key >= low).to(tl.int32))
    if valid > K:
        low = tl.min(tl.where(key >= low, key, 0x7FFFFFFFFFFFFFFF))
        high = tl.max(key)
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)  # The mean, rounded down, without a carry into bit 64.
        above = tl.sum((key >= middle).to(tl.int32))
        if above > K:
            low = middle + 1
        else:
            high = middle
            if above == K:
                low = middle

    chosen = key >= low
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    out_row = out + row * out_row_stride
    row_id = ~(key.to(tl.int32))
    tl.store(out_row + place * out_col_stride, row_id, mask=chosen & (place < K))
    tl.store(out_row + candidate * out_col_stride, -1, mask=(candidate >= valid) & (candidate < K))


def launch_pack(
    scores: torch.Tensor,
    local_ids: torch.Tensor,
    packed: torch.Tensor,
    rank: int,
    ranks: int,
    interleave: int,
    row_starts: torch.Tensor | None = None,
) -> None:
    """Write this rank's candidates to `packed`; the arguments are those of `reference.pack`.

    Args:
        packed: int64 `[queries, k]`, contiguous.
    """
    queries, k = local_ids.shape
    block = min(_PACK_BLOCK, max(32, triton.next_power_of_2(k)))
    _pack_kernel[(queries, triton.cdiv(k, block))](
        scores,
        local_ids,
        local_ids if row_starts is None else row_starts,
        packed,
        *scores.stride(),
        *local_ids.stride(),
        scores.shape[1],
        RANK=rank,
        RANKS=ranks,
        INTERLEAVE=interleave,
        HAS_ROW_STARTS=row_starts is not None,
        K=k,
        BLOCK=block,
        num_warps=max(1, block // 128),
    )


def launch_select(gathered: torch.Tensor, out: torch.Tensor, keys_per_thread: int = _KEYS_PER_THREAD) -> None:
    """Write the ids of the best candidates to `out`; the arguments are those of `reference.select`.

    Args:
        gathered: int64 `[ranks, queries, k]`, contiguous.
        out: int32 `[queries, k]`, any strides.
        keys_per_thread: Candidates that one thread holds, where the block is large enough.
    """
    ranks, queries, k = gathered.shape
    block = max(32, triton.next_power_of_2(ranks * k))
    _select_kernel[(queries,)](
        gathered,
        out,
        queries,
        *out.stride(),
        K=k,
        CANDIDATES=ranks * k,
        BLOCK=block,
        num_warps=min(32, max(1, block // (32 * keys_per_thread))),
    )
