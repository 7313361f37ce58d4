# SPDX-License-Identifier: Apache-2.0
"""Arms that are started, proven, measured in turns and ended, over servers that only pretend."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from vllm_kda_prefill.bench.arms import GATE, RETENTION, SPLIT, make_arm
from vllm_kda_prefill.bench.budget import Budget
from vllm_kda_prefill.bench.errors import BenchError
from vllm_kda_prefill.bench.records import Recorder
from vllm_kda_prefill.bench.server_process import ServerProcess
from vllm_kda_prefill.bench.servers import Server, in_turns
from vllm_kda_prefill.bench.settings import RunSettings
from vllm_kda_prefill.bench.suites import branches
from vllm_kda_prefill.bench.suites.run import run_suites

FAKE = Path(__file__).with_name("fake_server.py")
SERVE = f"{shlex.quote(sys.executable)} {shlex.quote(str(FAKE))}"
ROOT = str(Path(__file__).parents[2])


def bench(*arguments: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_kda_prefill", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env=os.environ | {"FAULT": fault, "NO_COLOR": "1", "TERM": "dumb"},
    )


def ab(folder: Path, *more: str, arms: str = "stock,ladder,equal", suites: str = "cold", fault: str = ""):
    quick = ("--sizes", "8192,9000", "--samples", "2", "--turns", "6", "--traces", "1", "--seconds", "90")
    files = ("--output", str(folder / "ab.jsonl"), "--logs", str(folder / "logs"))
    arguments = ("ab", "--model", "m", "--serve", SERVE, "--arms", arms, "--suites", suites)
    return bench(*arguments, *quick, *files, *more, fault=fault)


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "ab.jsonl").read_text().splitlines()]


def test_every_suite_over_three_arms(tmp_path):
    suites = "cold,branches,branches-room,decode,conversations,growth"
    small = ("--growth-sizes", "2048", "--contexts", "8192", "--output-tokens", "64", "--only", "decode=stock,ladder")
    done = ab(tmp_path, *small, "--", "--max-num-seqs", "8", suites=suites)
    assert done.returncode == 0, done.stderr
    for title in ("Cold prompts", "Branches off", "Decode", "Conversations", "by prompt length"):
        assert title in done.stdout
    found = records(tmp_path)
    assert found[0]["kind"] == "run"
    assert found[0]["packages"]["vllm"]
    assert found[0]["configuration"]["arms"]["ladder"]["environment"][GATE] == "1"
    assert found[0]["configuration"]["arms"]["stock"]["command"][-2:] == ["--max-num-seqs", "8"]
    samples = [record for record in found if record["kind"] == "sample"]
    cold = [sample for sample in samples if sample["suite"] == "cold"]
    assert len(cold) == 2 * 2 * 3
    assert {sample["cached"] for sample in cold} == {0}
    for suite in ("branches", "branches-room"):
        assert {(s["arm"], s["point"], s["cached"]) for s in samples if s["suite"] == suite} >= {
            ("stock", 7400, 0),
            ("ladder", 7400, 7168),
            ("equal", 5000, 4096),
        }
    assert {sample["arm"] for sample in samples if sample["suite"] == "decode"} == {"stock", "ladder"}
    assert {record["when"] for record in found if record["kind"] == "activation"} == {"before", "after"}
    probes = [record["name"] for record in found if record["kind"] == "probe" and record["arm"] == "ladder"]
    assert probes == ["cold 8192", "cold 9000", "repeated", "extended", "branches of equal"]


def test_two_servers_an_arm(tmp_path):
    arguments = ("--servers", "2", "--only", "cold=ladder,equal", "--growth-sizes", "2048")
    done = ab(tmp_path, *arguments, suites="cold,growth", arms="ladder,equal,stock")
    assert done.returncode == 0, done.stderr
    found = records(tmp_path)
    commands = {name: arm["command"] for name, arm in found[0]["configuration"]["arms"].items()}
    assert list(commands) == ["ladder", "ladder#2", "equal", "equal#2", "stock", "stock#2"]
    assert {record["arm"] for record in found if record.get("suite") == "cold"} == {*list(commands)[:4]}
    probed = [record["arm"] for record in found if record.get("name") == "branches of equal#2"]
    assert probed == ["equal#2", "ladder#2"]
    # 8,192 and 9,000 tokens, two rounds, two servers.
    rows = [
        line for line in done.stdout.splitlines() if "of 2 servers" in line and ("8,192" in line or "9,000" in line)
    ]
    assert len(rows) == 4
    assert all("4 of 2 servers" in row for row in rows)


def test_a_server_and_all_it_starts_keep_to_their_processors(tmp_path):
    (tmp_path / "show.py").write_text(
        "import os, subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import os; print(os.sched_getaffinity(0))'])\n"
    )
    processor = max(os.sched_getaffinity(0))
    serve = (sys.executable, str(tmp_path / "show.py"))
    server = ServerProcess(make_arm("stock", 512), "m", [], tmp_path, serve, {processor})
    with pytest.raises(BenchError, match="ended with 0"):
        asyncio.run(server.wait(30))
    assert server.read_log().strip() == str({processor})


def test_the_rest_goes_on_without_an_arm_that_is_not_believed(tmp_path):
    done = ab(tmp_path, "--keep-going", fault="unequal")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: not measured: equal; what was is in ")
    samples = [record for record in records(tmp_path) if record["kind"] == "sample"]
    assert {sample["arm"] for sample in samples} == {"stock", "ladder"}


@pytest.mark.parametrize(
    "fault, complaint",
    [
        ("idle gate", "arm ladder: the gate is not active (spans 0"),
        ("gate always on", "arm stock: the gate is active, and must not be"),
        ("unequal", "arm equal does not keep the states of ladder"),
        ("warm", "a cold prompt of 8192 tokens found 512 in the prefix cache"),
        ("does not start", "ended with 1: RuntimeError: the model does not fit"),
    ],
)
def test_a_run_that_cannot_be_believed_fails_with_one_line(tmp_path, fault, complaint):
    done = ab(tmp_path, fault=fault)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert complaint in errors[0]
    assert "Traceback" not in done.stderr
    assert records(tmp_path)[-1]["kind"] == "failure"


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (("--arms", "stock,fast"), "--arms fast: give some of stock, ladder"),
        (("--arms", "ladder@0"), "--arms ladder@0"),
        (("--arms", "stock,stock"), "name each arm once"),
        (("--suites", "warm"), "--suites warm: give some of cold"),
        (("--sizes", "8k"), "--sizes 8k: give positive numbers"),
        (("--only", "cold=ladder"), "--only cold=ladder: give SUITE=ARM"),
        (("--arms", "stock,equal"), "equal is held against ladder; name that one too"),
        (("--arms", "ladder@300,equal"), "equal is held against ladder; name that one too"),
        (("--arms", "stock@\u00b2"), "--arms stock@"),
        (("--only", "warm=stock"), "--only warm: give some of cold"),
        (("--only", "cold=stock", "--only", "cold=stock"), "name each suite once"),
        (("--serve", "'x"), "--serve 'x: No closing quotation"),
    ],
)
def test_values_that_cannot_be_used_end_with_status_two(arguments, complaint):
    done = bench("ab", "--model", "m", "--arms", "stock", *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert complaint in line


def test_a_command_that_does_not_start_leaves_an_older_run_alone(tmp_path):
    (tmp_path / "ab.jsonl").write_text("an older run")
    done = ab(tmp_path, "--serve", "/nonexistent/x", arms="stock")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: --serve /nonexistent/x: No such file")
    assert done.stdout == ""
    assert (tmp_path / "ab.jsonl").read_text() == "an older run"


def test_a_suite_without_time_for_a_sample_says_so(tmp_path, monkeypatch):
    async def run(*_: object) -> None:
        """Nothing but rounds that are not recorded."""

    monkeypatch.setattr(branches, "run", run)
    server = Server("stock", cast(Any, None))
    with (
        Recorder(tmp_path / "a.jsonl", {}) as recorder,
        pytest.raises(BenchError, match=r"^branches: no sample in its \d+ s; give more --seconds"),
    ):
        asyncio.run(run_suites(RunSettings(suites=("branches",)), [server], recorder, Budget(30.0)))


def test_the_others_go_on_and_are_proven_where_one_server_ends(tmp_path):
    more = ("--servers", "2", "--keep-going", "--contexts", "8192")
    done = ab(tmp_path, *more, arms="stock,ladder", suites="decode,conversations", fault="ends when it decodes")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert re.match(r"error: not measured: suite decode \(.*\), ladder; what was is in ", last), last
    found = records(tmp_path)
    proven = {record["arm"] for record in found if record["kind"] == "activation" and record["when"] == "after"}
    served = {record["arm"] for record in found if record["kind"] == "sample" and record["suite"] == "conversations"}
    assert proven == served == {"stock", "stock#2", "ladder#2"}


def test_more_processors_than_there_are_end_with_one_line(tmp_path):
    done = ab(tmp_path, "--processors", "4000", arms="stock")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: --processors 4000: servers 1 x 4000 and one for the client are more than the ")


def test_an_argument_that_the_runner_sets_is_refused(tmp_path):
    with pytest.raises(BenchError, match=r"^--port=1 is set by the runner"):
        ServerProcess(make_arm("stock", 512), "m", ["--port=1"], tmp_path)


def test_arms_differ_from_stock_in_what_they_say():
    stock, ladder, equal = (make_arm(name, 512) for name in ("stock", "ladder@260", "equal"))
    assert stock.environment[GATE] == "0"
    assert stock.arguments == ()
    assert ladder.environment[RETENTION] == "ladder"
    assert ladder.arguments == ("--num-gpu-blocks-override", "260")
    assert equal.equal_to == "ladder"
    assert not equal.coalesces
    assert {arm.environment[SPLIT[1]] for arm in (stock, ladder, equal)} == {"512"}


def test_servers_go_first_equally_often():
    order = [in_turns("abc", number) for number in range(6)]
    assert sorted(turn[0] for turn in order) == list("aabbcc")
    assert sorted(turn[-1] for turn in order) == list("aabbcc")


def test_a_budget_runs_one_round_at_least_and_then_what_fits():
    now = [0.0]
    budget = Budget(10.0, clock=lambda: now[0])

    def rounds(seconds: float, share: Budget) -> int:
        count = 0
        for _ in share.rounds(100):
            now[0] += seconds
            count += 1
        return count

    assert rounds(1.0, budget.share(0.5)) == 4
    assert rounds(100.0, budget.share(0.5)) == 1
    assert budget.left < 0
    assert rounds(1.0, budget) == 1
