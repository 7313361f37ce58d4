# SPDX-License-Identifier: Apache-2.0
"""The merge of the ranks' selections against a plain sort of Python floats, which are fp64.

Every test runs on the plain PyTorch form, on the Triton kernels in Triton's interpreter, and on them on a GPU. Triton
reads `TRITON_INTERPRET` when it is imported, so the second takes a Python of its own; one test starts it.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm.model_executor.layers.dcp_topk_merge import MAX_K, MAX_RANKS, UNUSED, reference
from vllm.model_executor.layers.dcp_topk_merge.merge import merge

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CHECKOUT = Path(__file__).resolve().parents[2]
KS = (1, 2, 127, 128, 512, 1000, 2048)
UNTOUCHED = -77


class Kernels:
    """Pack and select of one backend; tensors go to its device and come back."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.device = "cuda" if name == "cuda" else "cpu"

    def pack(self, scores, ids, rank, ranks, interleave, row_starts=None):
        if self.name == "reference":
            return reference.pack(scores, ids, rank, ranks, interleave, row_starts)
        from vllm.model_executor.layers.dcp_topk_merge._triton_kernels import launch_pack

        packed = torch.full(ids.shape, UNTOUCHED, dtype=torch.int64, device=self.device)
        starts = None if row_starts is None else row_starts.to(self.device)
        launch_pack(self._put(scores), self._put(ids), packed, rank, ranks, interleave, starts)
        return packed.cpu()

    def select(self, gathered, out=None):
        out = torch.full(gathered.shape[1:], UNTOUCHED, dtype=torch.int32) if out is None else out
        there = self._put(out)
        if self.name == "reference":
            reference.select(gathered, there)
        else:
            from vllm.model_executor.layers.dcp_topk_merge._triton_kernels import launch_select

            launch_select(gathered.to(self.device), there)
        return there.cpu()

    def _put(self, tensor):
        """The tensor on the device, with the strides it has here."""
        if self.device == "cpu":
            return tensor
        there = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
        return there.copy_(tensor)


ON_THE_CPU = "interpreter" if INTERPRETED else "reference"


@pytest.fixture(params=[ON_THE_CPU, pytest.param("cuda", marks=pytest.mark.gpu)])
def kernels(request):
    return Kernels(request.param)


def scores_of(kind: str, queries: int, rows: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(queries, rows, generator=generator)
    if kind == "tied":
        return (2 * scores).round() / 2  # With zeros of both signs.
    if kind == "constant":
        return torch.full_like(scores, -1.5)
    if kind == "relu":
        return scores.clamp_min(0.0)
    if kind == "tiny":
        return scores * 1e-41  # Subnormal.
    if kind in ("infinite", "nan"):
        pick = torch.rand(queries, rows, generator=generator)
        scores[pick < 0.1] = math.inf
        scores[(pick > 0.1) & (pick < 0.6)] = -math.inf
        if kind == "nan":
            scores[pick > 0.7] = math.nan
            scores[pick > 0.9] = -math.nan
    return scores


def best(scores: list[float], k: int) -> list[int]:
    """Positions of the `k` best by a plain sort: a NaN is worst, ties go to the lower position."""
    return sorted(range(len(scores)), key=lambda i: (math.isnan(scores[i]), -scores[i], i))[:k]


def rows_of_rank(rank: int, ranks: int, interleave: int, rows: int) -> list[int]:
    return [row for row in range(rows) if row // interleave % ranks == rank]


def ranks_lists(scores, lengths, k, ranks, interleave, shuffle=True):
    """Each rank's scores and its list of local ids, as the local selections leave them."""
    generator = torch.Generator().manual_seed(1)
    for rank in range(ranks):
        own = rows_of_rank(rank, ranks, interleave, scores.shape[1])
        local = scores[:, own]
        ids = torch.full((scores.shape[0], k), -1, dtype=torch.int32)
        for query, length in enumerate(lengths):
            visible = sum(row < length for row in own)
            chosen = torch.tensor(best(local[query, :visible].tolist(), k), dtype=torch.int32)
            if shuffle:
                chosen = chosen[torch.randperm(len(chosen), generator=generator)]
            ids[query, : len(chosen)] = chosen
        yield local, ids


def merged(kernels, scores, lengths, k, ranks, interleave):
    packed = [
        kernels.pack(local, ids, rank, ranks, interleave)
        for rank, (local, ids) in enumerate(ranks_lists(scores, lengths, k, ranks, interleave))
    ]
    return kernels.select(torch.stack(packed))


def check(out: torch.Tensor, scores: torch.Tensor, lengths: list[int]) -> None:
    """The selection is the one of one rank; unused places follow."""
    k = out.shape[1]
    for query, length in enumerate(lengths):
        wanted = best(scores[query, :length].tolist(), k)
        found = out[query].tolist()
        assert sorted(found[: len(wanted)]) == sorted(wanted)
        assert found[len(wanted) :] == [-1] * (k - len(wanted))


@pytest.mark.parametrize("kind", ["random", "tied", "constant", "relu", "tiny", "infinite", "nan"])
@pytest.mark.parametrize("k", KS)
def test_ranks_select_what_one_rank_selects(kernels, k, kind):
    ranks = 4
    scores = scores_of(kind, 3, max(6 * k, 40))
    lengths = [scores.shape[1], 2 * k + 3, k]
    check(merged(kernels, scores, lengths, k, ranks, 2), scores, lengths)


@pytest.mark.parametrize("ranks", range(1, MAX_RANKS + 1))
@pytest.mark.parametrize("k", [1, 128, 1000])
def test_any_number_of_ranks(kernels, ranks, k):
    scores = scores_of("tied", 2, ranks * k + 9, seed=ranks)
    lengths = [scores.shape[1], ranks * k]
    check(merged(kernels, scores, lengths, k, ranks, 1), scores, lengths)


def test_the_most_candidates_there_can_be(kernels):
    scores = scores_of("random", 1, MAX_RANKS * MAX_K + 100)
    check(merged(kernels, scores, [scores.shape[1]], MAX_K, MAX_RANKS, 32), scores, [scores.shape[1]])


@pytest.mark.parametrize("interleave", [1, 3, 16])
def test_short_rows_and_none(kernels, interleave):
    """Fewer rows than places, ranks without any, one row, none; and lengths around `k`."""
    k = 32
    scores = scores_of("nan", 9, 200)
    lengths = [0, 1, 2, interleave, interleave + 1, k - 1, k, k + 1, 200]
    check(merged(kernels, scores, lengths, k, 4, interleave), scores, lengths)


def test_a_nan_is_selected_only_where_places_are_left(kernels):
    scores = torch.tensor([[math.nan, -math.inf, -math.nan, 1.0, math.inf]])
    assert sorted(merged(kernels, scores, [5], 3, 2, 1)[0].tolist()) == [1, 3, 4]
    assert sorted(merged(kernels, scores, [5], 4, 2, 1)[0].tolist()) == [0, 1, 3, 4]


def test_unused_places_may_lie_between_candidates(kernels):
    scores = torch.tensor([[0.5, 3.0, 2.0, 1.0]])
    ids = torch.tensor([[-1, 2, -1, 0]], dtype=torch.int32)
    packed = kernels.pack(scores, ids, 1, 2, 1)
    assert packed[0, 0] == packed[0, 2] == UNUSED
    none = torch.full_like(packed, UNUSED)
    assert kernels.select(torch.stack([none, packed]))[0].tolist() == [5, 1, -1, -1]


def test_ids_that_fp32_cannot_hold(kernels):
    columns, start = 2**25 + 3, 2**25
    ids = torch.tensor([[start + 2, start, start + 1]], dtype=torch.int32)
    packed = kernels.pack(torch.zeros(1, columns), ids, 1, 2, 1)
    other = torch.full_like(packed, UNUSED)
    out = kernels.select(torch.stack([other, packed]))[0].tolist()
    assert out == [2 * (start + 2) + 1, 2 * start + 1, 2 * (start + 1) + 1]


def test_candidates_that_differ_in_their_last_bit(kernels):
    one = torch.tensor(1.0)
    above = torch.nextafter(one, torch.tensor(2.0))
    scores = torch.stack([one, above, one, above, -above, -one]).view(1, 6)
    assert sorted(merged(kernels, scores, [6], 2, 2, 1)[0].tolist()) == [1, 3]
    assert sorted(merged(kernels, scores, [6], 3, 2, 1)[0].tolist()) == [0, 1, 3]
    assert sorted(merged(kernels, scores, [6], 5, 2, 1)[0].tolist()) == [0, 1, 2, 3, 5]


def test_strides_and_row_starts_are_kept_to(kernels):
    k, ranks, queries = 5, 2, 3
    wide = scores_of("random", 64, queries).t()  # Column by column in memory.
    ids = torch.full((queries, 12), 9, dtype=torch.int32)[:, 2 : 2 + k]
    ids.copy_(torch.tensor([[3, 1, 0, 7, 2], [4, -1, 0, 1, 2], [-1, -1, -1, 5, -1]]))
    starts = torch.tensor([0, 10, 30], dtype=torch.int32)
    packed = kernels.pack(wide, ids, 0, ranks, 1, starts)
    shifted = torch.stack([wide[i, s : s + 30] for i, s in enumerate(starts.tolist())])
    assert torch.equal(packed, reference.pack(shifted.contiguous(), ids.contiguous(), 0, ranks, 1))
    buffer = torch.full((queries, 12), UNTOUCHED, dtype=torch.int32)
    out = kernels.select(torch.stack([packed, torch.full_like(packed, UNUSED)]), buffer[:, 2 : 2 + k])
    assert out.tolist() == [[6, 2, 0, 14, 4], [8, 0, 2, 4, -1], [10, -1, -1, -1, -1]]


def test_an_id_without_a_column_is_no_candidate(kernels):
    ids = torch.tensor([[0, 3, 1]], dtype=torch.int32)
    packed = kernels.pack(torch.tensor([[1.0, 2.0, 3.0]]), ids, 0, 1, 1)
    assert (packed[0] == UNUSED).tolist() == [False, True, False]
    assert (kernels.pack(torch.empty(1, 0), ids, 0, 1, 1) == UNUSED).all()


def test_the_same_candidates_give_the_same_order(kernels):
    """All ranks receive the same numbers, so their outputs are alike place by place."""
    scores = scores_of("tied", 64, 600)
    lists = ranks_lists(scores, [600] * 64, 128, 3, 4)
    packed = torch.stack([kernels.pack(local, ids, rank, 3, 4) for rank, (local, ids) in enumerate(lists)])
    once, again = kernels.select(packed), kernels.select(packed)
    check(once, scores, [600] * 64)
    assert torch.equal(once, again)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(INTERPRETED, reason="starts this very run")
def test_the_kernels_interpreted():
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-k", "interpreter"]
    command = [sys.executable, "-m", "pytest", *options, __file__]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(CHECKOUT)}
    run = subprocess.run(command, cwd=CHECKOUT, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None, run.stdout
    assert int(passed[1]) > 80
    assert "skipped" not in run.stdout


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
