# SPDX-License-Identifier: Apache-2.0
"""What the kernels compute, in plain PyTorch: for tests, and for tensors on the CPU."""

from __future__ import annotations

import torch

from . import UNUSED


def pack(
    scores: torch.Tensor,
    local_ids: torch.Tensor,
    rank: int,
    ranks: int,
    interleave: int,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Candidates of one rank in the packed form.

    Args:
        scores: fp32 `[queries, columns]`, the scores of the rank's own rows.
        local_ids: int32 `[queries, k]`, which of them are candidates; -1 in unused places. An id without a column is
            no candidate.
        rank: This rank, from 0 on.
        ranks: How many ranks share the rows.
        interleave: How many rows in a row belong to one rank before the next one's.
        row_starts: int32 `[queries]`, the column of local id 0; column 0 where not given.

    Returns:
        int64 `[queries, k]`, in the order of `local_ids`.
    """
    ids = local_ids.long()
    columns = ids if row_starts is None else ids + row_starts.long()[:, None]
    valid = (ids >= 0) & (columns < scores.shape[1])
    if scores.shape[1] == 0:
        return torch.full_like(ids, UNUSED)
    picked = scores.gather(1, torch.where(valid, columns, 0))
    bits = picked.view(torch.int32).long()
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = torch.where(picked == 0, 0, order)
    order = torch.where(picked.isnan(), -0x7FFFFFFF, order)
    global_ids = (ids // interleave * ranks + rank) * interleave + ids % interleave
    return torch.where(valid, order << 32 | (~global_ids & 0xFFFFFFFF), UNUSED)


def select(gathered: torch.Tensor, out: torch.Tensor) -> None:
    """Write the row ids of the best candidates of all ranks.

    Args:
        gathered: int64 `[ranks, queries, k]`, packed candidates.
        out: int32 `[queries, k]`. Selected ids come first, in an order that depends on nothing but `gathered`, so that
            all ranks have the same; -1 follows. The kernel's order is another one than this function's.
    """
    ranks, queries, k = gathered.shape
    keys = gathered.movedim(0, 1).reshape(queries, ranks * k)
    lowest = keys.topk(k).values[:, -1:].clamp_min(UNUSED + 1)
    chosen = keys >= lowest
    out.fill_(-1)
    places = chosen.cumsum(1) - 1
    rows = torch.arange(queries, device=keys.device)[:, None].expand_as(keys)
    out[rows[chosen], places[chosen]] = (~keys[chosen]).to(torch.int32)
