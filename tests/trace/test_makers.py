# SPDX-License-Identifier: Apache-2.0
"""Made-up traces are what their names say, and can be read."""

from __future__ import annotations

import random

import pytest

from vllm_kda_prefill.trace.bounds import in_units
from vllm_kda_prefill.trace.errors import TraceError
from vllm_kda_prefill.trace.makers import KINDS, Writing, make_lines, write_trace
from vllm_kda_prefill.trace.prompts import Trace
from vllm_kda_prefill.trace.reader import read_traces


@pytest.fixture
def make(tmp_path):
    def call(kind: str, requests: int | None = None, seed: int = 1) -> Trace:
        path = tmp_path / f"{kind}.jsonl.gz"
        write_trace(path, kind, requests, seed)
        return read_traces([path])

    return call


def hits(trace: Trace) -> list[int]:
    return [512 * prompt.hit for prompt in in_units(trace, 512, 0)]


def test_block_ids_are_equal_exactly_where_prefixes_are():
    writing = Writing(random.Random(0))
    one, other = writing.text(700), writing.text(400)
    first = writing.block_ids([one, other])
    assert len(first) == 3
    assert writing.block_ids([one, other, writing.text(1)])[:2] == first[:2]
    assert writing.block_ids([one, writing.text(400)])[:2] == [first[0], 3 + 1]
    assert not set(writing.block_ids([other, one])) & set(first)
    assert writing.block_ids([]) == []
    # The same whole block behind another one.
    blocks = [writing.text(512) for _ in range(3)]
    assert writing.block_ids([blocks[0], blocks[2]])[1] != writing.block_ids([blocks[1], blocks[2]])[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_trace_in_the_order_of_its_times(kind):
    lines = list(make_lines(kind, 50, seed=3))
    assert lines == list(make_lines(kind, 50, seed=3))
    assert len(lines) == 50


@pytest.mark.parametrize("kind", ["agents", "mix", "uniform", "scan"])
def test_another_seed_gives_another_trace(kind):
    assert list(make_lines(kind, 50, seed=3)) != list(make_lines(kind, 50, seed=4))


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_its_number_of_prompts_that_can_be_served(make, kind):
    trace = make(kind)
    assert len(trace.prompts) == KINDS[kind][1]
    assert trace.longest < 262_143


def test_agents_work_up_to_100_000_tokens(make):
    trace = make("agents")
    assert trace.longest > 100_000
    assert sum(hits(trace)) > 0.8 * trace.tokens


def test_uniform_prompts_share_nothing(make):
    assert not any(hits(make("uniform")))


def test_a_scan_comes_between_two_rounds_of_the_hot_prompts(make):
    found = hits(make("scan", 160))
    assert found == [0] * 80 + [16_384] * 20 + [0] * 60


def test_one_prompt_for_hours(make):
    trace = make("repeat")
    assert trace.prompts[-1].time == 10 * 1439
    assert hits(trace) == [0] + [11_776] * 1439


def test_the_last_104_640_tokens_are_rendered_anew(make):
    trace = make("rerender")
    lengths = [prompt.tokens for prompt in trace.prompts]
    assert (lengths[0], lengths[-1]) == (20_000, 150_000)
    # A turn parts from the one before where that one's own new part began.
    parts = [0, *(max(length - 104_640, 0) for length in lengths[:-1])]
    assert hits(trace) == [part // 512 * 512 for part in parts]
    assert sum(part > 0 for part in parts) == 3


def test_histories_of_20_000_to_150_000_tokens_and_104_640_new(make):
    trace = make("rerender-long")
    lengths = [prompt.tokens for prompt in trace.prompts]
    assert (lengths[0], lengths[-1]) == (124_640, 254_640)
    assert hits(trace) == [0, *((length - 104_640) // 512 * 512 for length in lengths[:-1])]


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(TraceError, match="cannot be written"):
        write_trace(tmp_path / "missing" / "x", "scan", 1)
