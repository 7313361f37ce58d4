# SPDX-License-Identifier: Apache-2.0
"""The two bounds, over traces small enough to follow by hand."""

from __future__ import annotations

import pytest

from tests.trace.by_hand import make_trace
from vllm_kda_prefill.trace.bounds import foresight_tokens, in_units, unbounded_tokens
from vllm_kda_prefill.trace.prompts import Trace

# The second prompt parts from the first after two blocks; the third repeats the first.
BRANCH = ((2048, [1, 2, 3, 4]), (2048, [1, 2, 5, 6]), (2048, [1, 2, 3, 4]))


def unbounded(trace: Trace, unit: int = 512, lookahead: int = 0) -> list[int]:
    return [prompt.hit for prompt in in_units(trace, unit, lookahead)]


def test_without_limit_a_prompt_finds_all_but_its_last_token():
    assert unbounded(make_trace(*BRANCH)) == [0, 2, 3]
    assert unbounded_tokens(in_units(make_trace(*BRANCH), 512, 0), 512) == 5 * 512


def test_a_last_block_that_is_shorter_is_not_found():
    assert unbounded(make_trace((1100, [1, 2, 3]), (1100, [1, 2, 3]), (1537, [1, 2, 3, 4]))) == [0, 2, 2]


def test_a_unit_may_be_a_part_of_a_recorded_block_or_several():
    trace = make_trace((200, [1, 2, 3, 4]), (200, [1, 2, 3, 5]), block_size=64)
    assert unbounded(trace, unit=32) == [0, 6]
    assert unbounded(trace, unit=96) == [0, 2]
    assert unbounded(trace, unit=128) == [0, 1]


def test_lookahead_hashes_need_the_begin_of_the_next_block():
    trace = make_trace(*BRANCH)
    # Blocks 2 and 3 are followed by other tokens; the last block by none, so that it has no hash.
    assert unbounded(trace, lookahead=3) == [0, 1, 3]


@pytest.mark.parametrize(
    ("num_blocks", "found"),
    [
        # After the first prompt: attention 1, 2, 3 and states at 2 (used next) and 3 (used after): 3 + 2 * 2 blocks.
        (7, 2 + 3),
        # The state at 3 goes. The one at 2 has served and stays, for nothing else wants its room.
        (6, 2 + 2),
        (4, 2 + 2),
        # The state at 2 goes too.
        (3, 0),
        (1, 0),
    ],
)
def test_foresight_drops_what_is_used_last(num_blocks, found):
    prompts = in_units(make_trace(*BRANCH), 512, 0)
    assert foresight_tokens(prompts, 512, num_blocks, 1, 2) == found * 512


def test_foresight_keeps_nothing_that_is_not_used_again():
    once = [(5120, [100 * number + block for block in range(10)]) for number in range(1, 5)]
    prompts = in_units(make_trace((2048, [1, 2, 3, 4]), *once, (2048, [1, 2, 3, 4])), 512, 0)
    assert foresight_tokens(prompts, 512, 3 + 2, 1, 2) == 3 * 512


def test_attention_of_several_ranks_takes_a_part_of_a_block():
    prompts = in_units(make_trace(*BRANCH), 512, 0)
    # 3 / 4 + 2 * 2 blocks.
    assert foresight_tokens(prompts, 512, 5, 1 / 4, 2) == 5 * 512
    assert foresight_tokens(prompts, 512, 4, 1 / 4, 2) == 4 * 512


def test_foresight_with_room_finds_what_no_limit_finds():
    prompts = in_units(make_trace(*BRANCH, (1024, [7, 8]), *BRANCH), 512, 0)
    assert foresight_tokens(prompts, 512, 1000, 1, 6) == unbounded_tokens(prompts, 512)
