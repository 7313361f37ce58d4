# SPDX-License-Identifier: Apache-2.0
"""Move dense state rows out of and into a pool by state index, on the device, without a host copy."""

from __future__ import annotations

import torch


def gather_states(pool: torch.Tensor, indices: torch.Tensor, present: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out[i]` with `pool[indices[i]]` where `present[i]`, else with zeros.

    Args:
        pool: `[states, ...]`, each state contiguous.
        indices: int32 `[n]`; an index outside the pool reads as zeros.
        present: bool `[n]`.
        out: `[n, ...]`, contiguous.
    """
    if pool.is_cuda:
        from ._triton_kernels import launch_gather

        launch_gather(pool, indices, present, out)
        return
    for row, (index, flag) in enumerate(zip(indices.tolist(), present.tolist(), strict=True)):
        if flag and 0 <= index < pool.shape[0]:
            out[row].copy_(pool[index])
        else:
            out[row].zero_()


def scatter_states(pool: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor) -> None:
    """Store `rows[i]` in `pool[indices[i]]`; an index at or below 0 or past the pool is skipped.

    Args:
        pool: `[states, ...]`, each state contiguous.
        indices: int32 `[n]`.
        rows: `[n, ...]`, contiguous.
    """
    if pool.is_cuda:
        from ._triton_kernels import launch_scatter

        launch_scatter(pool, indices, rows)
        return
    for row, index in enumerate(indices.tolist()):
        if 0 < index < pool.shape[0]:
            pool[index].copy_(rows[row])
