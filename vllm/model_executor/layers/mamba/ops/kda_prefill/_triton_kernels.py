# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the state and convolution copies; imported on the first CUDA call only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm.v1.core.prefill_plan import MAX_CHECKPOINTS

from .checkpoints import CheckpointMetadata

_BLOCK = 1024


@triton.jit
def _gather_kernel(pool, indices, present, out, state_stride, num_states, row_size, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + row).to(tl.int64)
    keep = (tl.load(present + row) != 0) & (index >= 0) & (index < num_states)
    inside = cols < row_size
    values = tl.load(pool + index * state_stride + cols, mask=inside & keep, other=0.0)
    tl.store(out + row * row_size + cols, values, mask=inside)


@triton.jit
def _scatter_kernel(pool, indices, rows, state_stride, num_states, row_size, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + row).to(tl.int64)
    write = (cols < row_size) & (index > 0) & (index < num_states)
    values = tl.load(rows + row * row_size + cols, mask=write)
    tl.store(pool + index * state_stride + cols, values, mask=write)


@triton.jit
def _conv_history_kernel(
    raw,
    pool,
    cu_seqlens,
    offsets,
    indices,
    raw_row_stride,
    raw_col_stride,
    state_stride,
    dim_stride,
    cell_stride,
    num_states,
    width,
    STATE_LEN: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(1)
    offset = tl.load(offsets + entry)
    index = tl.load(indices + entry).to(tl.int64)
    if (offset >= STATE_LEN) & (index > 0) & (index < num_states):
        end = tl.load(cu_seqlens + entry // ENTRIES) + offset
        cols = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        inside = cols < width
        for cell in tl.static_range(STATE_LEN):
            token = end - STATE_LEN + cell
            source = raw + token.to(tl.int64) * raw_row_stride + cols * raw_col_stride
            values = tl.load(source, mask=inside)
            tl.store(pool + index * state_stride + cols * dim_stride + cell * cell_stride, values, mask=inside)


def _row_size(pool: torch.Tensor) -> int:
    return pool[0].numel()


def launch_gather(pool: torch.Tensor, indices: torch.Tensor, present: torch.Tensor, out: torch.Tensor) -> None:
    size = _row_size(pool)
    indices, present = indices.contiguous(), present.contiguous()
    grid = (triton.cdiv(size, _BLOCK), indices.numel())
    _gather_kernel[grid](pool, indices, present.view(torch.uint8), out, pool.stride(0), pool.shape[0], size, _BLOCK)


def launch_scatter(pool: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor) -> None:
    size = _row_size(pool)
    indices = indices.contiguous()
    grid = (triton.cdiv(size, _BLOCK), indices.numel())
    _scatter_kernel[grid](pool, indices, rows, pool.stride(0), pool.shape[0], size, _BLOCK)


def launch_conv_history(
    raw_qkv: torch.Tensor,
    conv_pool: torch.Tensor,
    cu_seqlens: torch.Tensor,
    checkpoints: CheckpointMetadata,
    state_len: int,
) -> None:
    width = raw_qkv.shape[1]
    block = 256
    grid = (triton.cdiv(width, block), checkpoints.checkpoint_offsets.numel())
    _conv_history_kernel[grid](
        raw_qkv,
        conv_pool,
        cu_seqlens.contiguous(),
        checkpoints.checkpoint_offsets.contiguous(),
        checkpoints.state_indices.contiguous(),
        raw_qkv.stride(0),
        raw_qkv.stride(1),
        *conv_pool.stride(),
        conv_pool.shape[0],
        width,
        STATE_LEN=state_len,
        ENTRIES=MAX_CHECKPOINTS,
        BLOCK=block,
    )
