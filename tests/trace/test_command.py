# SPDX-License-Identifier: Apache-2.0
"""`kda-prefill bench trace` as a user runs it, in this process."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from tests.trace.by_hand import mooncake_line
from vllm_kda_prefill.cli import main

MAIN = list(range(16))
LINES = (mooncake_line(8192, MAIN), mooncake_line(8192, [*MAIN[:12], 101, 102, 103, 104], 1000))


@pytest.fixture
def command(monkeypatch, capsys):
    """Gives the exit status, and what was printed on stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kda-prefill", "bench", "trace", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        output = capsys.readouterr()
        return int(stop.value.code or 0), output.out, output.err

    yield call
    logging.disable(logging.NOTSET)


def test_json_of_every_arm_and_size(command, write):
    status, out, err = command(write(*LINES), "--blocks", "300,500", "--groups", 1, "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert (report["requests"], report["prompt_tokens"], report["unbounded_tokens"]) == (2, 16384, 6144)
    assert [(row["blocks"], row["arm"]) for row in report["rows"]] == [
        (size, arm) for size in (300, 500) for arm in ("stock", "ladder", "replay")
    ]
    assert [row["cached_tokens"] for row in report["rows"][:2]] == [0, 6144]


def test_the_old_flag_pages_means_blocks(command, write):
    status, out, _ = command(write(*LINES), "--pages", 300, "--policy", "ladder", "--json")
    assert status == 0
    assert [(row["blocks"], row["arm"]) for row in json.loads(out)["rows"]] == [(300, "stock"), (300, "ladder")]


def test_tables_and_a_plot(command, write, tmp_path):
    picture = tmp_path / "shares.png"
    status, out, _ = command(write(*LINES), "--blocks", "300,400", "--plot", picture)
    assert status == 0
    assert "2 requests, 16,384 prompt tokens, one at a time" in out
    assert "finds 6,144 of them, 0.3750" in out
    assert "of foresight" in out
    assert "checkpoint position" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_memory_is_laid_out_as_the_layout_command_does(command, write):
    status, out, _ = command(write(*LINES), "--memory", "24GiB,12GiB", "--policy", "ladder", "--mtp", 3, "--json")
    report = json.loads(out)
    assert status == 0
    assert report["layout"]["mamba_groups"] == 7
    blocks = [row["blocks"] for row in report["rows"]]
    assert blocks[0] == blocks[1] == pytest.approx(2 * blocks[2], abs=1)


@pytest.mark.parametrize(
    "flags", [("--concurrent", 2), ("--arrivals", 5, "--prefill-rate", 8000), ("--dcp", 4, "--mtp", 3)]
)
def test_load_and_layout(command, write, flags):
    status, out, _ = command(write(*LINES), "--blocks", 400, "--policy", "ladder", "--json", *flags)
    assert status == 0
    assert json.loads(out)["rows"][1]["computed_tokens"] <= 16384


def test_a_made_up_trace_can_be_replayed(command, tmp_path):
    path = tmp_path / "scan.jsonl.gz"
    assert command("--make", "repeat", path, "--requests", 3) == (0, "", "")
    status, out, _ = command(path, "--blocks", 300, "--policy", "ladder", "--json")
    assert status == 0
    assert [row["cached_tokens"] for row in json.loads(out)["rows"]] == [2 * 11776] * 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--blocks", "0"), "--blocks 0: give positive numbers with commas"),
        (("--blocks", "many"), "--blocks many: give positive numbers with commas"),
        (("--blocks", "10"), "10 blocks do not hold a prompt of 8192 tokens"),
        (("--memory", "much"), "'much' is no amount of memory"),
        (("--memory", "1MiB"), "--memory 1048576 bytes: a block takes"),
        (("--dcp", "3"), "--dcp 3: give 1, 2, 4 or 8 ranks"),
        (("--tp", "2", "--dcp", "4"), "--tp 2: give a multiple of --dcp, 4"),
        (("--mtp", "9"), "--mtp 9: give 0 to 8 draft tokens"),
        (("--policy", "best"), "--policy best: give ladder, replay, or both"),
        (("--arrivals", "0"), "--arrivals 0.0: give a number above 0"),
        (("--arrivals", "nan"), "--arrivals nan: give a number above 0"),
        (("--arrivals", "2", "--concurrent", "2"), "--concurrent 2: leave it out"),
        (("--prefill-rate", "0"), "--prefill-rate 0.0: give tokens a second"),
        (("--block-size", "500"), "--block-size 500: give a positive multiple of 16 tokens"),
        (("--requests", "0"), "--requests"),
        (("--plot", "x.gif"), "--plot x.gif: name a .png, .svg or .pdf file"),
        (("--make", "noise"), "--make noise: give one of agents, mix"),
    ],
)
def test_a_value_that_cannot_be_used_is_one_line(command, write, flags, message):
    status, out, err = command(write(*LINES), *flags)
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_bad_line_is_one_line_and_no_table(command, write):
    path = write(*LINES, "{}")
    assert command(path) == (2, "", f"error: {path}: line 3: timestamp: Field required\n")
