"""Export of the short convolution's history at checkpoint positions."""

from __future__ import annotations

import torch

from .base import CHUNK, CheckpointTargets


def export_conv_history(
    raw_qkv: torch.Tensor,
    conv_pool: torch.Tensor,
    cu_seqlens: torch.Tensor,
    targets: CheckpointTargets,
    state_len: int,
    token_indices: torch.Tensor | None = None,
) -> None:
    """Copy the ``state_len`` raw rows before each checkpoint into its slot's convolution window.

    ``raw_qkv`` is ``[T, W]``, the convolution's input, rows may be strided. ``conv_pool`` is
    ``[slots, W, cells]`` (for the layout that stores cells outermost, its transposed view), with
    ``cells >= state_len``: history goes to the first ``state_len`` cells, the speculative cells after them
    are not touched. ``cu_seqlens`` is int32 ``[N + 1]`` over the prefill rows' own tokens;
    ``token_indices`` maps those tokens to rows of ``raw_qkv`` where they are scattered among others.
    The caller has validated ``targets``; inactive entries and slots outside the pool write nothing.

    Raises ``ValueError`` when the shapes cannot belong together.
    """
    if raw_qkv.ndim != 2 or conv_pool.ndim != 3 or conv_pool.shape[1] != raw_qkv.shape[1]:
        raise ValueError(f"conv_pool {tuple(conv_pool.shape)} does not hold rows of raw_qkv {tuple(raw_qkv.shape)}")
    if not 0 < state_len <= min(conv_pool.shape[2], CHUNK):
        raise ValueError(f"state_len {state_len} does not fit {conv_pool.shape[2]} cells and a chunk of {CHUNK}")
    if conv_pool.dtype != raw_qkv.dtype:
        raise ValueError(f"conv_pool is {conv_pool.dtype}; raw_qkv is {raw_qkv.dtype}")
    if raw_qkv.is_cuda:
        from ._triton_kernels import launch_conv_history

        launch_conv_history(raw_qkv, conv_pool, cu_seqlens, targets, state_len, token_indices)
        return
    starts = cu_seqlens.tolist()
    for row, (offsets, slots) in enumerate(zip(targets.offsets.tolist(), targets.slots.tolist(), strict=True)):
        for offset, slot in zip(offsets, slots, strict=True):
            if offset < state_len or not 0 < slot < conv_pool.shape[0]:
                continue
            end = starts[row] + offset
            tokens = torch.arange(end - state_len, end)
            if token_indices is not None:
                tokens = token_indices[tokens].long()
            conv_pool[slot, :, :state_len] = raw_qkv[tokens].T
