# SPDX-License-Identifier: Apache-2.0
"""What a prefill plan may be."""

from __future__ import annotations

import pickle

import pytest

from vllm.v1.core.prefill_plan import PrefillPlan


@pytest.mark.parametrize(
    "start, end, positions, problem",
    [
        (0, 8192, (), "1 to 4 checkpoints, got 0"),
        (0, 8192, (512, 1024, 2048, 4096, 7680), "1 to 4 checkpoints, got 5"),
        (0, 8192, (4096, 4096), "sorted and unique"),
        (0, 8192, (7168, 4096), "sorted and unique"),
        (0, 8192, (4097,), "multiple of 16"),
        (8, 8192, (4096,), "multiple of 16"),
        (0, 8192, (0, 4096), "not inside"),
        (4096, 8192, (4096,), "not inside"),
        (0, 8192, (8192,), "not inside"),
        (0, 8192, (9216,), "not inside"),
        (512, 512, (512,), "empty"),
        (-512, 512, (0,), "below 0"),
        (0, 8192, (4096.0,), "plain integers"),
        (0, 8192, (True,), "plain integers"),
    ],
)
def test_rejects_positions(start: int, end: int, positions: tuple[int, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        PrefillPlan(start, end, positions, {1: tuple(range(1, 1 + len(positions)))})


def test_offsets_count_from_the_start() -> None:
    assert PrefillPlan(1024, 8192, (4096, 7680), {1: (5, 6)}).offsets == (3072, 6656)


@pytest.mark.parametrize(
    "block_ids, problem",
    [
        ({}, "at least one KV cache group"),
        ({1: (5,)}, "1 blocks for 2"),
        ({1: (5, 6, 7)}, "3 blocks for 2"),
        ({1: (5, 0)}, "block 0"),
        ({1: (5, -1)}, "block -1"),
        ({1: (5, 5)}, "block 5"),
        ({1: (5, 6), 2: (7, 6)}, "group 2: block 6"),
        ({1: (5, 6.0)}, "block 6.0"),
    ],
)
def test_rejects_block_ids(block_ids: dict[int, tuple[int, ...]], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        PrefillPlan(0, 8192, (4096, 7680), block_ids)


def test_bad_positions_are_rejected_with_good_blocks() -> None:
    with pytest.raises(ValueError, match="sorted and unique"):
        PrefillPlan(0, 8192, (7680, 4096), {1: (5, 6)})


def test_survives_pickling() -> None:
    plan = PrefillPlan(0, 8192, (4096, 7680), {1: (5, 6), 2: (7, 8)})
    assert pickle.loads(pickle.dumps(plan)) == plan
