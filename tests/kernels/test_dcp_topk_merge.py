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

from tests.kernels.dcp_topk_cases import check, ranks_lists, scores_of
from vllm.model_executor.layers.dcp_topk_merge import MAX_K, MAX_RANKS, UNUSED, reference

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


def merged(kernels, scores, lengths, k, ranks, interleave):
    packed = [
        kernels.pack(local, ids, rank, ranks, interleave)
        for rank, (local, ids) in enumerate(ranks_lists(scores, lengths, k, ranks, interleave))
    ]
    return kernels.select(torch.stack(packed))


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
