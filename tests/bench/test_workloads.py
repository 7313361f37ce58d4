# SPDX-License-Identifier: Apache-2.0
"""Prompts, branches and conversations."""

from __future__ import annotations

import pytest

from vllm_kda_prefill.bench.workloads import FIRST_TOKEN, PAST_TOKENS, Conversations, branch, prompt


def test_prompts_have_exact_lengths_of_ordinary_tokens():
    tokens = prompt(8192, "a", 1)
    assert len(tokens) == 8192
    assert min(tokens) >= FIRST_TOKEN
    assert max(tokens) < PAST_TOKENS


def test_prompts_repeat_with_their_seed_and_differ_otherwise():
    assert prompt(64, "a", 1) == prompt(64, "a", 1)
    assert prompt(64, "a", 1)[:4] != prompt(64, "a", 2)[:4]


def test_a_longer_prompt_does_not_begin_with_a_shorter_one():
    assert prompt(8192, "a", 1)[:16] != prompt(16384, "a", 1)[:16]


@pytest.mark.parametrize("at", [1, 500, 7900, 8191])
def test_a_branch_leaves_its_base_exactly_where_asked(at):
    base = prompt(8192, 1)
    for seed in range(20):
        tokens = branch(base, at, seed)
        assert len(tokens) == len(base)
        assert tokens[:at] == base[:at]
        assert tokens[at] != base[at]


def test_conversations_repeat_with_their_settings_and_seed():
    turns = list(Conversations(turns=20))
    assert [turn.tokens for turn in turns] == [turn.tokens for turn in Conversations(turns=20)]
    assert turns[0].tokens != next(iter(Conversations(turns=20, seed=2))).tokens


def test_turns_keep_what_they_say_they_keep():
    trace = Conversations(turns=80, users=3)
    history: dict[int, list[int]] = {}
    system = next(iter(trace)).tokens[: trace.system]
    for turn in trace:
        before = history.get(turn.user, [])
        assert turn.tokens[: trace.system] == system
        assert turn.tokens[: turn.kept] == before[: turn.kept]
        assert len(turn.tokens) <= trace.longest
        if turn.kind == "extend":
            assert turn.kept == len(before) < len(turn.tokens)
        elif turn.kind == "branch":
            assert trace.system <= turn.kept < len(before) == len(turn.tokens)
        history[turn.user] = turn.tokens
    assert {turn.kind for turn in trace} == {"first", "extend", "branch"}


@pytest.mark.parametrize("branching, kind", [(0.0, "branch"), (1.0, "extend")])
def test_branching_is_a_probability(branching, kind):
    assert kind not in {turn.kind for turn in Conversations(turns=40, branching=branching)}
