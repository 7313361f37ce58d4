# SPDX-License-Identifier: Apache-2.0
"""The merge under stock's name and calling convention, on several ranks at once: threads that gather together."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.model_executor.layers import sparse_attn_indexer
from vllm.model_executor.layers.dcp_topk_merge import merge
from vllm.models.glm5next import coalesced
from vllm.models.glm5next.nvidia import sparse_indexer

STOCK = sparse_attn_indexer, sparse_indexer
NAMES = ("_merge_dcp_topk_global", "has_cutedsl")


class Ranks:
    """Runs a function on every rank at once; `get_dcp_group` of a rank's thread is that rank's group."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.barrier = threading.Barrier(number, timeout=60)
        self.sent: list[torch.Tensor] = [torch.empty(0)] * number
        self.gathers = 0
        self.here = threading.local()

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        self.sent[self.here.rank] = input_.clone()
        if self.barrier.wait() == 0:
            self.gathers += 1
        gathered = torch.cat(self.sent, dim)
        self.barrier.wait()
        return gathered

    def run(self, function):
        def on_rank(rank):
            self.here.rank = rank
            return function(rank)

        with ThreadPoolExecutor(self.number) as threads:
            return list(threads.map(on_rank, range(self.number)))


@pytest.fixture
def bound(monkeypatch):
    """Bind the merge for one test."""
    for module in STOCK:
        for name in NAMES:
            monkeypatch.setattr(module, name, getattr(module, name))  # Put back afterwards.
    merge.bind()


@pytest.fixture
def ranks(bound, monkeypatch, request):
    group = Ranks(request.param)
    monkeypatch.setattr("vllm.distributed.get_dcp_group", lambda: group)
    return group


def local_selection(scores: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
    """What stock's row selection leaves: the best local ids of each row in no order, then -1."""
    visible = torch.arange(scores.shape[1]) < lengths[:, None]
    masked = scores.masked_fill(~visible, -torch.inf)
    kept = min(k, scores.shape[1])
    best = masked.topk(kept, sorted=False).indices
    out = torch.full((scores.shape[0], k), -1, dtype=torch.int32)
    out[:, :kept] = torch.where(visible.gather(1, best), best, -1)
    return out


@pytest.mark.parametrize("ranks", [2, 3, 4, 8], indirect=True)
@pytest.mark.parametrize("module", STOCK, ids=["deepseek", "glm"])
@pytest.mark.parametrize("interleave", [1, 32])
def test_every_rank_has_what_one_rank_selects(ranks, module, interleave):
    """A causal prefill of 900 rows with the model's 128, called as the prefill paths call it."""
    k, queries, rows = 128, 60, 900
    scores = torch.randn(queries, rows, generator=torch.Generator().manual_seed(3))
    lengths = torch.arange(queries) * rows // (queries - 1)
    owner = torch.arange(rows) // interleave % ranks.number

    def on_rank(rank):
        own = scores[:, owner == rank]
        visible = (torch.arange(rows) < lengths[:, None])[:, owner == rank].sum(1)
        padded = torch.nn.functional.pad(own, (0, 64))[:, : own.shape[1]]  # Stock's rows are padded.
        chosen = local_selection(own, visible, k)
        module._merge_dcp_topk_global(padded, chosen, k, rank, ranks.number, interleave, row_starts=None)
        return chosen

    results = ranks.run(on_rank)
    for other in results[1:]:
        assert torch.equal(results[0], other)
    wanted = local_selection(scores, lengths, k)
    assert torch.equal(results[0].sort().values, wanted.sort().values)
    assert ranks.gathers == 1


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_decode_rows_and_a_rank_without_any_row_of_its_own(ranks):
    """Four rows of a request with three drafts, in a slice of a wider buffer; rank 3 holds nothing of 96 rows."""
    k, rows, interleave = 128, 96, 32
    scores = torch.randn(4, rows, generator=torch.Generator().manual_seed(4))

    def on_rank(rank):
        own = scores[:, rank * interleave : (rank + 1) * interleave]
        buffer = torch.full((4, 400), 7, dtype=torch.int32)
        destination = buffer[:, :k]
        destination.copy_(local_selection(own, torch.full((4,), own.shape[1]), k))
        sparse_indexer._merge_dcp_topk_global(own, destination, k, rank, ranks.number, interleave)
        return buffer

    for buffer in ranks.run(on_rank):
        assert (buffer[:, k:] == 7).all()
        assert torch.equal(buffer[:, :rows].sort().values, torch.arange(rows, dtype=torch.int32).expand(4, rows))
        assert (buffer[:, rows:k] == -1).all()


def test_one_rank_gathers_nothing(bound):
    ids = torch.tensor([[5, -1]], dtype=torch.int32)
    sparse_indexer._merge_dcp_topk_global(torch.zeros(1, 8), ids, 2, 0, 1, 1)
    assert ids.tolist() == [[5, -1]]


def test_stock_registers_no_kernels_of_its_own_merge(bound):
    assert [module.has_cutedsl() for module in STOCK] == [False, False]


def test_stocks_selector_refuses_two_ranks_of_this_model():
    """What the indexers of the unbound model would have compiled at start; docs/upstream.md, fault 7."""
    dsa = pytest.importorskip("vllm.model_executor.kernels.attention.dsa.dcp_indexer_cutedsl")
    selector = dsa.StableTopKFromGatheredCandidatesKernel
    assert selector.kernel(selector.CompileKey(topk=128, num_candidates=4 * 128)) is not None
    with pytest.raises(AssertionError, match="multiple of 512, got 256"):
        selector.kernel(selector.CompileKey(topk=128, num_candidates=2 * 128))


def test_the_model_binds_it_before_its_indexers_are_built(bound, monkeypatch):
    seen: list[Any] = []

    def build(self, *, vllm_config: Any, prefix: str = "") -> None:
        seen.extend(module._merge_dcp_topk_global for module in STOCK)
        torch.nn.Module.__init__(self)
        self.model = torch.nn.Module()

    monkeypatch.setattr(coalesced.Glm5NextForCausalLM, "__init__", build)
    for module in STOCK:
        monkeypatch.setattr(module, "_merge_dcp_topk_global", None)
    config: Any = SimpleNamespace(additional_config={})
    model: Any = coalesced.CoalescedGlm5NextForCausalLM
    model(vllm_config=config)
    assert seen == [merge.merge_dcp_topk] * 2
