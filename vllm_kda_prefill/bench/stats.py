# SPDX-License-Identifier: Apache-2.0
"""Medians, spreads and bootstrap intervals of ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 4000
LEVEL = 0.95


@dataclass(frozen=True)
class Spread:
    """A sample's middle and width.

    Attributes:
        count: Samples.
        median: Their median.
        low: Their lower quartile.
        high: Their upper quartile.
    """

    count: int
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one sample."""
        low, median, high = np.percentile(np.asarray(values, dtype=float), [25, 50, 75])
        return cls(len(values), float(median), float(low), float(high))


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians with its interval.

    Attributes:
        value: Ratio of the two medians.
        low: Lower end of the 95 % bootstrap interval.
        high: Upper end.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio_of_medians(above: Sequence[Sequence[float]], below: Sequence[Sequence[float]], seed: int = 0) -> Ratio:
    """Median of `above` over median of `below`, with a percentile bootstrap interval.

    Samples of the two are drawn independently of each other: rounds pair them in time, and what a round has in
    common then makes the interval wider, never narrower. Where an arm had several servers, servers are drawn first:
    samples of one share what its processes were given on the host, and more of them do not average that out.

    Args:
        above: Positive samples, by server.
        below: Positive samples, by server.
        seed: Of the resampling.
    """
    source = np.random.default_rng(seed)
    left, right = ([np.asarray(values, dtype=float) for values in servers] for servers in (above, below))
    ratios = _resampled_medians(left, source) / _resampled_medians(right, source)
    low, high = np.percentile(ratios, [50 - 50 * LEVEL, 50 + 50 * LEVEL])
    return Ratio(float(np.median(np.concatenate(left)) / np.median(np.concatenate(right))), float(low), float(high))


def _resampled_medians(servers: Sequence[np.ndarray], source: np.random.Generator) -> np.ndarray:
    if len(servers) == 1:
        (values,) = servers
        return np.median(values[source.integers(0, len(values), (RESAMPLES, len(values)))], axis=1)

    def median() -> float:
        drawn = [servers[index] for index in source.integers(0, len(servers), len(servers))]
        return float(
            np.median(np.concatenate([values[source.integers(0, len(values), len(values))] for values in drawn]))
        )

    return np.asarray([median() for _ in range(RESAMPLES)])


def ratio_of_sums(above: Sequence[Sequence[float]], below: Sequence[Sequence[float]], seed: int = 0) -> Ratio:
    """Sum of `above` over sum of `below`, of pairs, with an interval from resampling the pairs.

    Where a side had several servers, a pair counts with the mean of theirs, and servers are drawn first.

    Args:
        above: What each server of the one side had of every pair; `[servers][pairs]`.
        below: The same of the other side, of the same pairs; some value is above 0.
        seed: Of the resampling.
    """
    source = np.random.default_rng(seed)
    sides = [np.asarray(values, dtype=float) for values in (above, below)]
    servers = [source.integers(0, len(side), (RESAMPLES, len(side))) for side in sides]
    pairs = source.integers(0, sides[0].shape[1], (RESAMPLES, sides[0].shape[1]))
    left, right = (
        np.take_along_axis(side[drawn].mean(axis=1), pairs, axis=1).sum(axis=1)
        for side, drawn in zip(sides, servers, strict=True)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = left / right
    # Resamples with nothing on either side say nothing.
    ratios = ratios[~np.isnan(ratios)]
    # Observed ends: one may be infinite, where a resample has nothing below.
    low, high = np.percentile(ratios, [50 - 50 * LEVEL, 50 + 50 * LEVEL], method="closest_observation")
    return Ratio(float(sides[0].mean(axis=0).sum() / sides[1].mean(axis=0).sum()), float(low), float(high))
