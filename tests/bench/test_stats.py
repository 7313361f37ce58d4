# SPDX-License-Identifier: Apache-2.0
"""Medians, spreads and intervals."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_kda_prefill.bench.stats import Spread, ratio_of_medians, ratio_of_sums


def test_spread_is_the_median_and_the_quartiles():
    assert Spread.of([4, 1, 3, 2, 5]) == Spread(5, 3.0, 2.0, 4.0)


def test_ratio_of_medians_is_exact_without_noise():
    ratio = ratio_of_medians([[3.0] * 8], [[2.0] * 5])
    assert (ratio.value, ratio.low, ratio.high) == (1.5, 1.5, 1.5)
    assert str(ratio) == "1.500 (1.500 to 1.500)"


def test_the_interval_covers_the_ratio_as_often_as_it_says():
    source = np.random.default_rng(7)
    hits = 0
    for trial in range(120):
        above, below = source.normal(3.0, 0.3, 25).tolist(), source.normal(2.0, 0.2, 25).tolist()
        ratio = ratio_of_medians([above], [below], seed=trial)
        hits += ratio.low <= 1.5 <= ratio.high
    assert hits / 120 >= 0.88


def test_the_interval_narrows_with_samples():
    source = np.random.default_rng(3)
    few, many = (
        ratio_of_medians([source.normal(3, 0.3, n).tolist()], [source.normal(2, 0.2, n).tolist()]) for n in (6, 600)
    )
    assert many.high - many.low < (few.high - few.low) / 3


def test_the_same_samples_give_the_same_interval():
    assert ratio_of_medians([[1, 2, 4]], [[1, 3, 5]]) == ratio_of_medians([[1, 2, 4]], [[1, 3, 5]])


def test_more_samples_do_not_narrow_what_servers_differ_by():
    source = np.random.default_rng(5)
    fast, slow = (source.normal(rate, 0.01, 200).tolist() for rate in (1.1, 0.9))
    apart = ratio_of_medians([fast, slow], [slow, fast])
    assert apart.value == pytest.approx(1.0, abs=0.05)
    assert apart.low < 0.85
    assert apart.high > 1.15
    alike = ratio_of_medians([slow, slow], [slow, slow])
    assert alike.high - alike.low < 0.02


def test_ratio_of_sums_resamples_pairs():
    ratio = ratio_of_sums([[2.0, 20.0, 0.2]], [[1.0, 10.0, 0.1]])
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))


def test_ratio_of_sums_over_nothing_has_no_upper_end():
    ratio = ratio_of_sums([[1.0, 1.0, 2.0]], [[0.0, 0.0, 1.0]])
    assert ratio.value == 4.0
    assert ratio.high == float("inf")


def test_resamples_with_nothing_on_either_side_are_no_ratio():
    ratio = ratio_of_sums([[0.0] * 4 + [512.0] * 2], [[0.0] * 4 + [512.0] * 2])
    assert (ratio.value, ratio.low, ratio.high) == (1.0, 1.0, 1.0)


def test_only_servers_that_differ_change_an_interval():
    source = np.random.default_rng(11)
    above, below = source.normal(1.0, 0.3, 60).tolist(), source.normal(1.0, 0.3, 60).tolist()
    once, twice = ratio_of_sums([above], [below]), ratio_of_sums([above, above], [below, below])
    assert twice.high - twice.low == pytest.approx(once.high - once.low, rel=0.1)
    assert twice.value == pytest.approx(once.value)
    slower = [1.2 * value for value in below]
    apart = ratio_of_sums([below, slower], [below, below])
    assert apart.low <= 1.0
    assert apart.high >= 1.2
