# SPDX-License-Identifier: Apache-2.0
"""The demo's conversation: what is reused, in how many passes, and that every answer is right."""

import pytest

from vllm_kda_prefill.demo.conversation import TOLERANCE, TURNS, Conversation, Turn
from vllm_kda_prefill.planning import Layout
from vllm_kda_prefill.toymodel.blocks import Blocks


@pytest.fixture(scope="module")
def records():
    conversation = Conversation()
    assert len(list(conversation.play())) == conversation.steps
    return conversation.records


@pytest.mark.parametrize("arm", ["stock", "coalesced"])
def test_every_answer_equals_an_uncached_run(records, arm):
    assert [record.turn for record in records[arm]] == list(TURNS)
    assert all(record.difference < TOLERANCE for record in records[arm])


def test_follow_ups_resume_at_the_rung_below_where_they_leave(records):
    assert [record.cached for record in records["coalesced"]] == [0, 7680, 7168, 6144, 4096, 7680, 7680]
    assert [record.cached for record in records["stock"]] == [0, 7680, 0, 0, 0, 7680, 7680]


def test_every_prompt_is_one_pass(records):
    assert [record.passes for record in records["coalesced"]] == [1] * len(TURNS)
    assert [record.passes for record in records["stock"]] == [1, 1, 2, 2, 2, 1, 2]


def test_one_query_retains_four_states(records):
    first = records["coalesced"][0]
    assert first.spans[0].checkpoints == first.retained == (4096, 6144, 7168, 7680)
    assert records["stock"][0].retained == (7680,)


@pytest.mark.parametrize("dcp", [2, 4])
def test_answers_are_right_on_wider_attention_blocks(dcp):
    conversation = Conversation(Layout(dcp=dcp, mtp=3, num_blocks=400, mamba_groups=2), turns=TURNS[:4])
    assert all(record.difference < TOLERANCE for _, record in conversation.play())


# A wrong state must be seen. Each plant spoils what the first turn leaves for the second.
TWO_TURNS = (TURNS[0], Turn("leaves at 6,500", 6500, 200))


def zero_states_of_new_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Blocks.write_state

    def zeroed(self, group, page, state, prefix):
        write(self, group, page, state * 0.0 if self.group[page] == -1 else state, prefix)

    monkeypatch.setattr(Blocks, "write_state", zeroed)


def shift_exported_window(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Blocks.write_window
    monkeypatch.setattr(
        Blocks,
        "write_window",
        lambda self, group, page, rows, ends: write(self, group, page, rows.roll(1, 0), ends),
    )


def swap_attention_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Blocks.write_rows
    monkeypatch.setattr(
        Blocks,
        "write_rows",
        lambda self, group, pages, offsets, rows, ends: write(self, group, pages, offsets.flip(0), rows, ends),
    )


@pytest.mark.parametrize("plant", [zero_states_of_new_pages, shift_exported_window, swap_attention_rows])
def test_planted_wrong_content_is_caught(monkeypatch, plant):
    conversation = Conversation(turns=TWO_TURNS)
    turns = conversation.play()
    plant(monkeypatch)
    differences = [record.difference for arm, record in turns if arm == "coalesced"]
    assert max(differences) > TOLERANCE
