# SPDX-License-Identifier: Apache-2.0
"""Export of the short convolution's history at checkpoint positions."""

from __future__ import annotations

import torch

from vllm.v1.core.prefill_plan import CHECKPOINT_ALIGNMENT

from .checkpoints import CheckpointMetadata


def export_conv_history(
    raw_qkv: torch.Tensor,
    conv_pool: torch.Tensor,
    cu_seqlens: torch.Tensor,
    checkpoints: CheckpointMetadata,
    state_len: int,
) -> None:
    """Copy the raw rows before each checkpoint into its convolution window.

    Inactive entries and state indices outside the pool write nothing.

    Args:
        raw_qkv: `[T, W]`, the convolution's input; rows may be strided.
        conv_pool: `[states, W, cells]` (for the layout that stores cells outermost, its transposed view), in the
            dtype of `raw_qkv`. History goes to the first `state_len` cells; the speculative cells behind them are
            not touched.
        cu_seqlens: int32 `[N + 1]` over the rows of `raw_qkv`.
        checkpoints: Validated by the caller.
        state_len: Raw rows in one window.

    Raises:
        ValueError: The shapes or dtypes cannot belong together.
    """
    if raw_qkv.ndim != 2 or conv_pool.ndim != 3 or conv_pool.shape[1] != raw_qkv.shape[1]:
        raise ValueError(f"conv_pool {tuple(conv_pool.shape)} does not hold rows of raw_qkv {tuple(raw_qkv.shape)}")
    if not 0 < state_len <= min(conv_pool.shape[2], CHECKPOINT_ALIGNMENT):
        raise ValueError(
            f"state_len {state_len} does not fit {conv_pool.shape[2]} cells and {CHECKPOINT_ALIGNMENT} tokens"
        )
    if conv_pool.dtype != raw_qkv.dtype:
        raise ValueError(f"conv_pool is {conv_pool.dtype}; raw_qkv is {raw_qkv.dtype}")
    if raw_qkv.is_cuda:
        from ._triton_kernels import launch_conv_history

        launch_conv_history(raw_qkv, conv_pool, cu_seqlens, checkpoints, state_len)
        return
    starts = cu_seqlens.tolist()
    tables = (checkpoints.checkpoint_offsets.tolist(), checkpoints.state_indices.tolist())
    for row, (offsets, indices) in enumerate(zip(*tables, strict=True)):
        for offset, index in zip(offsets, indices, strict=True):
            if offset >= state_len and 0 < index < conv_pool.shape[0]:
                end = starts[row] + offset
                conv_pool[index, :, :state_len] = raw_qkv[end - state_len : end].T
