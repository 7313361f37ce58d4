# SPDX-License-Identifier: Apache-2.0
"""What the forward pass calls in place of stock's merge, and where it is put in place."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch

from . import MAX_K, MAX_RANKS

MODULES = (
    "vllm.model_executor.layers.sparse_attn_indexer",
    "vllm.models.glm5next.nvidia.sparse_indexer",
)
"""Modules of stock vLLM that call the merge: the one that defines it, and the one that imports its name."""


class Group(Protocol):
    """What is used of a vLLM process group."""

    def all_gather(self, input_: torch.Tensor, dim: int) -> torch.Tensor:
        """Concatenate every rank's `input_` along `dim`, in rank order."""


def merge_dcp_topk(
    logits: torch.Tensor,
    topk_indices: torch.Tensor,
    topk_tokens: int,
    dcp_rank: int,
    dcp_world_size: int,
    cp_interleave: int,
    row_starts: torch.Tensor | None = None,
) -> None:
    """Replace this rank's selection by the best of all ranks, the same on every rank.

    Stock's `_merge_dcp_topk_global`, with its calling convention, for any `topk_tokens` from 1 to `MAX_K`. Nothing
    waits for the device. The two buffers come from PyTorch's allocator, as stock's do: under a CUDA graph's capture
    that is the graph's own pool, and a replay allocates nothing.

    Args:
        logits: fp32 `[queries, columns]`, any strides: the scores of this rank's rows.
        topk_indices: int32 `[queries, topk_tokens]`, any strides. In: the rank's best local ids, -1 in unused places.
            Out: ids in the whole context in no particular order, the same on all ranks, then -1. What attends to the
            rows takes them in any order, and -1 anywhere.
        topk_tokens: How many rows are selected.
        dcp_rank: This rank in the group.
        dcp_world_size: Ranks of the group. With 1 nothing is done.
        cp_interleave: Rows in a row that belong to one rank.
        row_starts: int32 `[queries]`, the column of local id 0; column 0 where not given.

    Raises:
        ValueError: Other dtypes or shapes, or more rows or ranks than the kernel was made for.
    """
    if dcp_world_size <= 1:
        return
    from vllm.distributed import get_dcp_group

    merge(logits, topk_indices, topk_tokens, dcp_rank, dcp_world_size, cp_interleave, row_starts, get_dcp_group())


def merge(
    scores: torch.Tensor,
    ids: torch.Tensor,
    k: int,
    rank: int,
    ranks: int,
    interleave: int,
    row_starts: torch.Tensor | None,
    group: Group,
) -> None:
    """`merge_dcp_topk` over a given group."""
    if scores.dtype != torch.float32 or ids.dtype != torch.int32 or ids.shape != (scores.shape[0], k):
        raise ValueError(
            f"the merge of {ranks} ranks takes float32 scores and int32 ids, {k} a query, of as many queries; got "
            f"{scores.dtype} {list(scores.shape)} and {ids.dtype} {list(ids.shape)}"
        )
    if not (1 <= k <= MAX_K and ranks <= MAX_RANKS):
        raise ValueError(
            f"{ranks} ranks that select {k} rows each: the merge takes up to {MAX_RANKS} ranks and 1 to {MAX_K} rows; "
            "pass a smaller --decode-context-parallel-size"
        )
    queries = ids.shape[0]
    if queries == 0:
        return  # On all ranks alike: queries are not divided.
    if not ids.is_cuda:
        from .reference import pack, select

        packed = pack(scores, ids, rank, ranks, interleave, row_starts)
        select(group.all_gather(packed, dim=0).view(ranks, queries, k), ids)
        return
    from ._triton_kernels import launch_pack, launch_select

    packed = torch.empty((queries, k), dtype=torch.int64, device=ids.device)
    launch_pack(scores, ids, packed, rank, ranks, interleave, row_starts)
    # Rank after rank, as the collective writes them: another dim would cost a copy of all candidates.
    launch_select(group.all_gather(packed, dim=0).view(ranks, queries, k), ids)


def _has_no_cutedsl() -> bool:
    return False


def bind() -> None:
    """Put the merge in place of stock's under every name that it is called by.

    It runs before an indexer is built. Stock's indexers then ask for CuTeDSL, only to have the kernels of stock's merge
    compiled at start. They are not needed any more, and one of them takes multiples of 512 candidates alone: it would
    end the start of two ranks that select 128 rows each. So they are told that there is no CuTeDSL.
    """
    for name in MODULES:
        module: Any = importlib.import_module(name)
        module._merge_dcp_topk_global = merge_dcp_topk
        module.has_cutedsl = _has_no_cutedsl
