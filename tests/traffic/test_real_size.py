# SPDX-License-Identifier: Apache-2.0
"""The real sizes: Mamba blocks of 512 tokens, steps of 8,192, prompts of up to 40,000."""

from __future__ import annotations

import pytest

from tests.traffic.layouts import LONGEST_REAL, REAL_BLOCK
from tests.traffic.machine import RealSizeTraffic
from tests.traffic.suite import run
from tests.traffic.world import Setting, World
from vllm_kda_prefill.planning import Layout


def test_nothing_wrong_is_ever_served():
    run(RealSizeTraffic, examples=3, steps=10)


@pytest.mark.parametrize(("dcp", "asynchronous", "resumed"), [(1, True, 32_256), (2, False, 32_256), (4, True, 32_256)])
def test_whoever_leaves_40000_tokens_resumes_at_a_checkpoint(dcp, asynchronous, resumed):
    layout = Layout(REAL_BLOCK, REAL_BLOCK, dcp=dcp, mtp=3, num_blocks=200, mamba_groups=2, max_model_len=65536)
    world = World(Setting(layout, asynchronous=asynchronous))
    prompt = world.words(LONGEST_REAL)
    world.arrive(prompt, outputs=20)
    world.drain()
    world.arrive(prompt[:33_000] + world.words(1000), outputs=20)
    world.drain()
    assert world.counts["hit tokens"] == resumed
    assert world.counts["outputs"] >= 40
