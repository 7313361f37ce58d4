# SPDX-License-Identifier: Apache-2.0
"""Records to tables, plots and one page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import targets
from vllm_kda_prefill.bench import summary
from vllm_kda_prefill.bench.errors import BenchError
from vllm_kda_prefill.bench.records import Recorder, read
from vllm_kda_prefill.bench.report import render
from vllm_kda_prefill.bench.summary import Samples

TTFT = {"stock": 0.100, "ladder": 0.100, "equal": 0.160}


def write_run(path: Path) -> Path:
    """A run whose figures are known."""
    with Recorder(path, {"model": "<script>"}) as recorder:
        recorder.add("activation", when="before", arm="ladder", spans=3, exported=12, plans=[])
        for number in range(6):
            noise = 1 + 0.001 * number
            for arm, ttft in TTFT.items():
                timing = {"prompt": 8192, "cached": 0, "ttft": ttft * noise, "seconds": ttft, "output": 1}
                recorder.add("sample", suite="cold", arm=arm, round=number, size=8192, **timing)
                recorder.add("sample", suite="growth", arm=arm, round=number, size=2048, **timing | {"prompt": 2048})
            for arm, ttft, cached in (("stock", 0.136, 0), ("ladder", 0.034, 7168)):
                timing = {"prompt": 8192, "cached": cached, "ttft": ttft * noise}
                for suite in ("branches", "branches-room"):
                    recorder.add("sample", suite=suite, arm=arm, round=number, point=7400, **timing)
            for arm, steps in (("stock", 200.0), ("ladder", 190.0)):
                rates = {"tokens_per_second": steps * 1.5, "steps_per_second": steps, "acceptance_length": 1.5}
                recorder.add("sample", suite="decode", arm=arm, round=number, context=8192, requests=1, **rates)
            for arm, cached in (("stock", 1000), ("ladder", 2500), ("stock@9", 1000), ("ladder@9", 900)):
                turn = {"trace": 1, "turn": number, "what": "branch", "prompt": 5000, "cached": cached, "ttft": 0.05}
                recorder.add("sample", suite="conversations", arm=arm, **turn)
    return path


def test_ratios_are_the_other_arms_time_over_this_ones(tmp_path):
    section = summary.cold(Samples(read(write_run(tmp_path / "a.jsonl"))))
    assert section is not None
    row = next(row for row in section.rows if row[1] == "ladder")
    assert row[0] == "8,192"
    assert row[2] == "6"
    assert row[4] == "81,716"  # 8,192 tokens in 0.10025 s
    assert [cell.split()[0] for cell in row[5:]] == ["1.000", "1.600"]


def test_verdicts_follow_the_interval(tmp_path):
    section = targets.section(Samples(read(write_run(tmp_path / "a.jsonl"))))
    assert section is not None
    verdicts = {row[0]: row[3] for row in section.rows}
    assert verdicts["cold 8,192 tokens, equal over ladder"] == "met"
    assert verdicts["cold 8,192 tokens, stock over ladder"] == "met"
    assert verdicts["branch that leaves 8,192 tokens at 7,400, in a cache with room, stock over ladder"].startswith(
        "met"
    )
    assert verdicts["decode steps/s, C1 at 8,192, ladder over stock"] == "missed"
    assert verdicts["conversations, cached tokens with ample memory, ladder over stock"] == "met"
    assert verdicts["conversations, cached tokens with 9 blocks, ladder over stock"] == "missed"


def test_targets_are_shown_for_each_run_of_a_folder(tmp_path):
    def show() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "benchmarks.targets", str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])

    assert show().returncode == 1
    write_run(tmp_path / "a.jsonl")
    done = show()
    assert done.returncode == 0, done.stderr
    assert "a: targets" in done.stdout
    assert "decode steps/s, C1 at 8,192, ladder over stock" in done.stdout


def test_turns_count_where_every_server_of_both_arms_served_them(tmp_path):
    """A trace that was cut inside a turn, and two servers of an arm: 1.1 whatever the order of the lines."""
    with Recorder(tmp_path / "a.jsonl", {}) as recorder:
        for turn in range(9):
            for arm in ("stock", "ladder", "stock#2", "ladder#2"):
                if turn == 8 and arm != "stock":
                    continue
                ours, base = arm.startswith("ladder"), 1000 * 3**turn
                cached = {"cached": 1.1 * base if ours else base, "ttft": base / (1.25 if ours else 1.0)}
                recorder.add(
                    "sample", suite="conversations", arm=arm, trace=1, turn=turn, what="extend", prompt=10**8, **cached
                )
    samples = Samples(read(tmp_path / "a.jsonl"))
    section = summary.conversations(samples)
    assert section is not None
    (row,) = (row for row in section.rows if row[0] == "ladder")
    assert row[3] == "1.100 (1.100 to 1.100)"
    assert row[-1] == "1.250 (1.250 to 1.250)"
    verdicts = targets.section(samples)
    assert verdicts is not None
    assert [row[2:] for row in verdicts.rows] == [("1.100 (1.100 to 1.100)", "missed")]


def test_conversations_that_found_nothing_have_no_verdict(tmp_path):
    with Recorder(tmp_path / "a.jsonl", {}) as recorder:
        for arm in ("stock", "ladder"):
            turn = {"trace": 1, "turn": 0, "what": "first", "prompt": 5000, "cached": 0, "ttft": 0.05}
            recorder.add("sample", suite="conversations", arm=arm, **turn)
    samples = Samples(read(tmp_path / "a.jsonl"))
    assert targets.section(samples) is None
    section = summary.conversations(samples)
    assert section is not None
    assert [row[3] for row in section.rows] == ["-", "-"]


def test_the_page_needs_nothing_beside_it(tmp_path):
    write_run(tmp_path / "a.jsonl")
    written = {path.name for path in render(tmp_path, tmp_path / "out")}
    plots = {f"a-{name}.png" for name in ("cold", "branches", "branches-room", "conversations", "decode", "growth")}
    assert written == plots | {"report.html", "report.md"}
    page = (tmp_path / "out" / "report.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert page.count("data:image/png;base64,") == len(plots)
    assert "<script>" not in page
    markdown = (tmp_path / "out" / "report.md").read_text()
    assert "| 8,192 | ladder | 6 |" in markdown
    assert "ladder: 3 spans, 12 states" in markdown


def test_a_run_that_failed_is_reported_as_failed(tmp_path):
    with pytest.raises(BenchError), Recorder(tmp_path / "a.jsonl", {}):
        raise BenchError("arm ladder: the gate is not active")
    render(tmp_path, tmp_path)
    assert "**Failed:** arm ladder: the gate is not active" in (tmp_path / "report.md").read_text()


def test_a_cut_last_line_is_left_out_and_any_other_is_refused(tmp_path):
    path = write_run(tmp_path / "a.jsonl")
    whole = len(list(read(path)))
    path.write_text(path.read_text()[:-20])
    assert len(list(read(path))) == whole - 1
    path.write_text("nonsense\n" + path.read_text())
    with pytest.raises(BenchError, match=r"a\.jsonl: line 1 is no record"):
        render(tmp_path, tmp_path)


def test_a_folder_without_records_is_one_clear_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "vllm_kda_prefill", "bench", "report", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: {tmp_path}: no .jsonl file in it; name the folder that kda-prefill bench wrote to"
    ]


def test_records_say_what_ran_on_what(tmp_path):
    (head, *_) = read(write_run(tmp_path / "a.jsonl"))
    assert head["kind"] == "run"
    assert head["packages"]["vllm"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", head["date"])
    assert head["configuration"] == {"model": "<script>"}
    assert json.dumps(head)
