# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that pack a rank's candidates and select the best of all ranks; imported on the first call only.

The selection bisects for the `k`-th best score: it counts the candidates at or above the middle between the worst and
the best, until they are `k`. That takes some 12 steps, 32 at most. Where the `k`-th best score is tied and not all fit,
the packed numbers with that score, which all differ, are bisected too: 32 steps more at most.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import UNUSED

_PACK_BLOCK = 512
_KEYS_PER_THREAD = 16

_UNUSED = tl.constexpr(UNUSED)


@triton.jit(do_not_specialize=["score_row_stride", "id_row_stride", "num_cols"])
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


@triton.jit(do_not_specialize=["num_rows", "out_row_stride"])
def _select_kernel(
    gathered,
    out,
    num_rows,
    out_row_stride,
    out_col_stride,
    K: tl.constexpr,
    CANDIDATES: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # A thread holds whole columns of the tile, so most of the prefix sum below stays inside threads.
    candidate = tl.arange(0, DEPTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    rank = (candidate // K).to(tl.int64)
    inside = candidate < CANDIDATES
    key = tl.load(gathered + (rank * num_rows + row) * K + candidate % K, mask=inside, other=_UNUSED)
    score = (key >> 32).to(tl.int32)

    # The `K`-th best score lies in [low, high], and `count` candidates are at or above low.
    low = tl.full((), -0x7FFFFFFF, tl.int32)
    high = low
    valid = tl.sum((score >= low).to(tl.int32))
    count = valid
    if valid > K:
        low = tl.min(tl.where(score >= low, score, 0x7FFFFFFF))
        high = tl.max(score)
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # The mean, rounded up, without an overflow.
        above = tl.sum((score >= middle).to(tl.int32))
        if above >= K:
            low = middle
            count = above
            if above == K:
                high = middle
        else:
            high = middle - 1

    # Where more have that score than fit, the lowest number that is selected, in the same way.
    lowest = low.to(tl.int64) << 32
    if count > K:
        highest = lowest + 0xFFFFFFFF
        while lowest < highest:
            center = highest - ((highest - lowest) >> 1)
            above = tl.sum((key >= center).to(tl.int32))
            if above >= K:
                lowest = center
                if above == K:
                    highest = center
            else:
                highest = center - 1

    chosen = key >= lowest
    number = chosen.to(tl.int32)
    of_column = tl.sum(number, 0)
    place = (tl.cumsum(of_column, 0) - of_column)[None, :] + tl.cumsum(number, 0) - 1
    out += row * out_row_stride
    tl.store(out + place * out_col_stride, ~key.to(tl.int32), mask=chosen & (place < K))
    if valid < K:
        tl.store(out + candidate * out_col_stride, -1, mask=(candidate >= valid) & (candidate < K))


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
    warps = min(32, max(1, block // (32 * keys_per_thread)))
    width = min(block, 64 * warps)
    _select_kernel[(queries,)](
        gathered,
        out,
        queries,
        *out.stride(),
        K=k,
        CANDIDATES=ranks * k,
        DEPTH=block // width,
        WIDTH=width,
        num_warps=warps,
    )
