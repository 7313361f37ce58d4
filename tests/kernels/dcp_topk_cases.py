# SPDX-License-Identifier: Apache-2.0
"""Scores, the ranks' own selections of them, and the selection that one rank would make: cases for the merge."""

from __future__ import annotations

import math

import torch


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


def check(out: torch.Tensor, scores: torch.Tensor, lengths: list[int]) -> None:
    """The selection is the one of one rank; unused places follow."""
    k = out.shape[1]
    for query, length in enumerate(lengths):
        wanted = best(scores[query, :length].tolist(), k)
        found = out[query].tolist()
        assert sorted(found[: len(wanted)]) == sorted(wanted)
        assert found[len(wanted) :] == [-1] * (k - len(wanted))
