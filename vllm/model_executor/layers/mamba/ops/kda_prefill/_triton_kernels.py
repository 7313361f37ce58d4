"""Triton kernels of the state and convolution copies; imported on the first CUDA call only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .base import MAX_CHECKPOINTS, CheckpointTargets

_BLOCK = 1024


@triton.jit
def _gather_kernel(pool, slots, present, out, slot_stride, num_slots, row_size, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row).to(tl.int64)
    keep = (tl.load(present + row) != 0) & (slot >= 0) & (slot < num_slots)
    inside = cols < row_size
    values = tl.load(pool + slot * slot_stride + cols, mask=inside & keep, other=0.0)
    tl.store(out + row * row_size + cols, values, mask=inside)


@triton.jit
def _scatter_kernel(pool, slots, rows, slot_stride, num_slots, row_size, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row).to(tl.int64)
    write = (cols < row_size) & (slot > 0) & (slot < num_slots)
    values = tl.load(rows + row * row_size + cols, mask=write)
    tl.store(pool + slot * slot_stride + cols, values, mask=write)


@triton.jit
def _conv_history_kernel(
    raw,
    pool,
    cu_seqlens,
    offsets,
    slots,
    token_indices,
    raw_row_stride,
    raw_col_stride,
    slot_stride,
    dim_stride,
    cell_stride,
    num_slots,
    width,
    STATE_LEN: tl.constexpr,
    ENTRIES: tl.constexpr,
    HAS_TOKEN_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(1)
    offset = tl.load(offsets + entry)
    slot = tl.load(slots + entry).to(tl.int64)
    if (offset >= STATE_LEN) & (slot > 0) & (slot < num_slots):
        end = tl.load(cu_seqlens + entry // ENTRIES) + offset
        cols = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        inside = cols < width
        for cell in tl.static_range(STATE_LEN):
            token = end - STATE_LEN + cell
            if HAS_TOKEN_MAP:
                token = tl.load(token_indices + token)
            source = raw + token.to(tl.int64) * raw_row_stride + cols * raw_col_stride
            values = tl.load(source, mask=inside)
            tl.store(pool + slot * slot_stride + cols * dim_stride + cell * cell_stride, values, mask=inside)


def _row_size(pool: torch.Tensor) -> int:
    return pool[0].numel()


def launch_gather(pool: torch.Tensor, slots: torch.Tensor, present: torch.Tensor, out: torch.Tensor) -> None:
    size = _row_size(pool)
    slots, present = slots.contiguous(), present.contiguous()
    grid = (triton.cdiv(size, _BLOCK), slots.numel())
    _gather_kernel[grid](pool, slots, present.view(torch.uint8), out, pool.stride(0), pool.shape[0], size, _BLOCK)


def launch_scatter(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    size = _row_size(pool)
    slots = slots.contiguous()
    grid = (triton.cdiv(size, _BLOCK), slots.numel())
    _scatter_kernel[grid](pool, slots, rows, pool.stride(0), pool.shape[0], size, _BLOCK)


def launch_conv_history(
    raw_qkv: torch.Tensor,
    conv_pool: torch.Tensor,
    cu_seqlens: torch.Tensor,
    targets: CheckpointTargets,
    state_len: int,
    token_indices: torch.Tensor | None,
) -> None:
    width = raw_qkv.shape[1]
    block = 256
    grid = (triton.cdiv(width, block), targets.offsets.numel())
    _conv_history_kernel[grid](
        raw_qkv,
        conv_pool,
        cu_seqlens.contiguous(),
        targets.offsets.contiguous(),
        targets.slots.contiguous(),
        cu_seqlens if token_indices is None else token_indices,
        raw_qkv.stride(0),
        raw_qkv.stride(1),
        *conv_pool.stride(),
        conv_pool.shape[0],
        width,
        STATE_LEN=state_len,
        ENTRIES=MAX_CHECKPOINTS,
        HAS_TOKEN_MAP=token_indices is not None,
        BLOCK=block,
    )
