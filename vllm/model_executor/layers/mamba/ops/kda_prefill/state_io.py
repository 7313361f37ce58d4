"""Move dense state rows out of and into a pool by slot index, on the device, without a host copy."""

from __future__ import annotations

import torch


def gather_states(pool: torch.Tensor, slots: torch.Tensor, present: torch.Tensor, out: torch.Tensor) -> None:
    """Fill ``out[i]`` with ``pool[slots[i]]`` where ``present[i]``, else with zeros.

    ``pool`` is ``[slots, ...]`` with contiguous slots, ``slots`` int32 ``[n]``, ``present`` bool ``[n]``,
    ``out`` contiguous ``[n, ...]``. A slot outside the pool reads as zeros.
    """
    if pool.is_cuda:
        from ._triton_kernels import launch_gather

        launch_gather(pool, slots, present, out)
        return
    for row, (slot, flag) in enumerate(zip(slots.tolist(), present.tolist(), strict=True)):
        if flag and 0 <= slot < pool.shape[0]:
            out[row].copy_(pool[slot])
        else:
            out[row].zero_()


def scatter_states(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Store ``rows[i]`` in ``pool[slots[i]]``; a slot at or below 0 or past the pool is skipped."""
    if pool.is_cuda:
        from ._triton_kernels import launch_scatter

        launch_scatter(pool, slots, rows)
        return
    for row, slot in enumerate(slots.tolist()):
        if 0 < slot < pool.shape[0]:
            pool[slot].copy_(rows[row])
