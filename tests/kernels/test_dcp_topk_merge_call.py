# SPDX-License-Identifier: Apache-2.0
"""The merge as its caller meets it: what it refuses, what it asks of the group, and inside a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.dcp_topk_cases import check, ranks_lists, scores_of
from vllm.model_executor.layers.dcp_topk_merge import UNUSED, reference
from vllm.model_executor.layers.dcp_topk_merge.merge import merge


class OneProcess:
    """A group whose ranks' lists are known beforehand: `lists[r]` takes the place of what rank `r` sends."""

    def __init__(self, lists, rank):
        self.lists, self.rank = lists, rank

    def all_gather(self, input_, dim):
        assert dim == 0
        assert input_.element_size() == 8
        self.lists[self.rank].copy_(input_)
        return self.lists.view(-1, input_.shape[1])


@pytest.mark.parametrize(
    ("k", "ranks", "message"),
    [(0, 2, "2 ranks that select 0 rows"), (2049, 2, "1 to 2048 rows"), (4, 9, "9 ranks .* pass a smaller")],
)
def test_sizes_that_the_kernel_was_not_made_for_are_refused(k, ranks, message):
    ids = torch.zeros(1, k, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        merge(torch.zeros(1, 4), ids, k, 0, ranks, 1, None, OneProcess(None, 0))


@pytest.mark.parametrize(
    ("dtype", "shape", "ids_dtype"),
    [
        (torch.bfloat16, (2, 4), torch.int32),
        (torch.float32, (2, 4), torch.int64),
        (torch.float32, (2, 5), torch.int32),
        (torch.float32, (3, 4), torch.int32),
    ],
)
def test_other_dtypes_and_shapes_are_refused(dtype, shape, ids_dtype):
    scores, ids = torch.zeros(2, 9, dtype=dtype), torch.zeros(shape, dtype=ids_dtype)
    with pytest.raises(ValueError, match="takes float32 scores and int32 ids, 4 a query"):
        merge(scores, ids, 4, 0, 2, 1, None, OneProcess(None, 0))


def test_no_queries_ask_nothing_of_the_group():
    merge(torch.zeros(0, 9), torch.zeros(0, 4, dtype=torch.int32), 4, 0, 2, 1, None, OneProcess(None, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("k", [128, 512])
def test_a_cuda_graph_replays_with_changed_inputs(k):
    """Four rows of one decoding request with three drafts: captured on one input, replayed on others."""
    ranks, rank, queries = 4, 2, 4
    scores = torch.zeros(queries, 4 * k, device="cuda")
    ids = torch.zeros(queries, k, dtype=torch.int32, device="cuda")
    kept = torch.zeros_like(ids)
    others = torch.full((ranks, queries, k), UNUSED, device="cuda")

    def step():
        ids.copy_(kept)
        merge(scores, ids, k, rank, ranks, 1, None, OneProcess(others, rank))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    before = None
    for seed, lengths in enumerate([[16 * k - 3, 16 * k - 2, 16 * k - 1, 16 * k], [7, 8, 9, 10], [0, 0, 1, 2]]):
        everywhere = scores_of("tied", queries, 16 * k, seed)
        for other, (local, chosen) in enumerate(ranks_lists(everywhere, lengths, k, ranks, 1)):
            others[other].copy_(reference.pack(local, chosen, other, ranks, 1))
            if other == rank:
                scores.copy_(local)
                kept.copy_(chosen)
        others[rank].fill_(UNUSED)
        graph.replay()
        check(ids.cpu(), everywhere, lengths)
        assert before is None or not torch.equal(before, ids)
        before = ids.clone()


@pytest.mark.gpu
def test_the_merge_does_not_wait_for_the_device():
    others = torch.full((2, 8, 128), UNUSED, device="cuda")
    scores, ids = torch.randn(8, 500, device="cuda"), torch.arange(128, dtype=torch.int32, device="cuda").repeat(8, 1)
    merge(scores, ids, 128, 0, 2, 1, None, OneProcess(others, 0))  # Compiles.
    torch.cuda.set_sync_debug_mode("error")
    try:
        merge(scores, ids, 128, 0, 2, 1, None, OneProcess(others, 0))
    finally:
        torch.cuda.set_sync_debug_mode("default")
