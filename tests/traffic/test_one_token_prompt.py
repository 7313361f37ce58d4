# SPDX-License-Identifier: Apache-2.0
"""A third fault of stock vLLM 0.33.0, found by this traffic: a prompt of one token beside decoding requests.

With multi-token prediction stock pads a lone last token with placeholder drafts. Where the prompt has no other
token the worker runs the padded row as a prefill, which cannot take the placeholders' states back.
"""

from __future__ import annotations

import pytest

from tests.invariants.checked_worker import WrongContentError
from tests.traffic.world import Setting, World
from vllm_kda_prefill.planning import Arm, Layout

LAYOUT = Layout(attention_block=32, mamba_block=32, mtp=3, budget=512, num_blocks=60, max_model_len=4096)


def serve_one_token_beside_a_decode(arm: Arm, asynchronous: bool) -> list[int]:
    """Tokens scheduled for the one-token prompt, step by step."""
    world = World(Setting(LAYOUT, arm, asynchronous=asynchronous))
    world.arrive(world.words(40), outputs=30)
    for _ in range(3):
        world.step()
    short = world.arrive(world.words(1), outputs=8)
    scheduled = []
    while short in world.live:
        world.schedule()
        scheduled.append(world.server.in_flight[-1].num_scheduled_tokens.get(short, 0))
    world.drain()
    return scheduled


@pytest.mark.parametrize("asynchronous", [False, True])
def test_stock_keeps_the_state_after_placeholders(asynchronous):
    with pytest.raises(WrongContentError, match="r1 resumes at 1 "):
        serve_one_token_beside_a_decode("stock", asynchronous)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_placeholders_where_nothing_precedes_them(asynchronous):
    assert serve_one_token_beside_a_decode("coalesced", asynchronous)[0] == 1
