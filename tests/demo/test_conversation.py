# SPDX-License-Identifier: Apache-2.0
"""The demo's conversation: what is reused, in how many passes, and that every answer is right."""

import json
import subprocess
import sys

import pytest

from vllm_kda_prefill.demo.conversation import TOLERANCE, TURNS, Conversation, Turn
from vllm_kda_prefill.planning import Layout
from vllm_kda_prefill.toymodel.blocks import Blocks


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    return tmp_path_factory.mktemp("demo") / "demo.png"


@pytest.fixture(scope="module")
def demo(picture):
    """What `kda-prefill demo` says of its run, which all tests of it share."""
    command = [sys.executable, "-m", "vllm_kda_prefill", "demo", "--json", "--plot", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def column(demo, arm, name):
    return [turn[name] for turn in demo[arm]]


@pytest.mark.parametrize("arm", ["stock", "coalesced"])
def test_every_answer_equals_an_uncached_run(demo, arm):
    assert column(demo, arm, "turn") == [turn.name for turn in TURNS]
    assert all(difference < TOLERANCE for difference in column(demo, arm, "difference"))
    assert demo["all_equal"] is True


def test_follow_ups_resume_at_the_state_below_where_they_leave(demo):
    assert column(demo, "coalesced", "cached") == [0, 7680, 7168, 6144, 4096, 7680, 7680]
    assert column(demo, "stock", "cached") == [0, 7680, 0, 0, 0, 7680, 7680]


def test_every_prompt_is_one_pass(demo):
    assert column(demo, "coalesced", "passes") == [1] * len(TURNS)
    assert column(demo, "stock", "passes") == [1, 1, 2, 2, 2, 1, 2]


def test_one_query_retains_four_states(demo):
    first = demo["coalesced"][0]
    assert first["spans"][0]["checkpoints"] == first["retained"] == [4096, 6144, 7168, 7680]
    assert demo["stock"][0]["retained"] == [7680]


def test_the_picture_is_drawn(demo, picture):
    assert 10_000 < picture.stat().st_size < 200_000


@pytest.mark.parametrize("dcp", [2, 4])
def test_answers_are_right_on_wider_attention_blocks(dcp):
    conversation = Conversation(Layout(dcp=dcp, mtp=3, num_blocks=400, mamba_groups=2), turns=TURNS[:4])
    played = list(conversation.play())
    assert len(played) == conversation.steps
    assert all(record.difference < TOLERANCE for _, record in played)


# A wrong state must be seen. Each plant spoils what the first turn leaves for the second.
TWO_TURNS = (TURNS[0], Turn("leaves at 6,500", 6500, 200))


def zero_states_of_new_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Blocks.write_state

    def zeroed(self, block_id, state):
        write(self, block_id, state * 0.0 if self.states[block_id].isnan().all() else state)

    monkeypatch.setattr(Blocks, "write_state", zeroed)


def shift_exported_window(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Blocks.write_window
    monkeypatch.setattr(
        Blocks,
        "write_window",
        lambda self, block_id, rows: write(self, block_id, rows.roll(1, 0)),
    )


def swap_attention_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Blocks.write_rows
    monkeypatch.setattr(
        Blocks,
        "write_rows",
        lambda self, block_ids, offsets, rows: write(self, block_ids, offsets.flip(0), rows),
    )


@pytest.mark.parametrize("plant", [zero_states_of_new_blocks, shift_exported_window, swap_attention_rows])
def test_planted_wrong_content_is_caught(monkeypatch, plant):
    conversation = Conversation(turns=TWO_TURNS)
    turns = conversation.play()
    plant(monkeypatch)
    differences = [record.difference for arm, record in turns if arm == "coalesced"]
    assert max(differences) > TOLERANCE
