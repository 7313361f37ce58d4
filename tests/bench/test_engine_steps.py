# SPDX-License-Identifier: Apache-2.0
"""The engine benchmark on made-up engines: what it sends, and what its tables say."""

import json
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from benchmarks import bench_engine


class MadeUp:
    """Takes twice as long for everything that `slow` names."""

    def __init__(self, slow: bool) -> None:
        self.slow = slow
        self.closed = False
        self.sent: list[dict[str, Any]] = []

    def step(self, step):
        self.sent.append(step)
        factor = 2.0 if self.slow else 1.0
        if "generate" in step:
            return [{"seconds": 0.05 * factor, "cached": 0}]
        parts = dict.fromkeys((*bench_engine.PARTS_OF_A_STEP[1:],), 0.5 * factor)
        return {"times": [4.0 * factor] * step["steps"], "full": True, **parts}

    def close(self):
        self.closed = True


@pytest.fixture
def engines(monkeypatch):
    made = [bench_engine.Engine(arm, f"{arm}#1", cast(Any, MadeUp(slow=arm == "stock"))) for arm in bench_engine.ARMS]
    monkeypatch.setattr(bench_engine, "start", lambda *_: made)
    return made


def run(output, *options):
    app = bench_engine.typer.Typer()
    app.command()(bench_engine.main)
    arguments = [str(output), "--seconds", "0.01", "--servers", "1", *options]
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_both_arms_are_sampled_in_turns_and_compared(engines, tmp_path):
    shown = run(tmp_path / "out.jsonl").output
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    samples = [record for record in records if record["kind"] == "sample"]
    points, settings = len(bench_engine.POINTS) + 1, len(bench_engine.SETTINGS)
    rounds = 1 + max(sample["round"] for sample in samples)
    assert len(samples) == rounds * 2 * (points + settings)
    assert {sample["step"] for sample in samples if sample["suite"] == "decode" and sample["arm"] == "stock"} == {8.0}
    rows = [line for line in shown.splitlines() if "2.000 (2.000 to 2.000)" in line]
    assert len(rows) == points + settings * len(bench_engine.PARTS_OF_A_STEP)
    assert all(engine.process.closed for engine in engines)
    # All parts are twice as slow, and so is what both arms have in common: the arm is not slower, the host was.
    assert sum("1.000 (1.000 to 1.000)" in line for line in rows) == settings * len(bench_engine.PARTS_OF_A_STEP)
    assert run(tmp_path / "out.jsonl", "--again").output == shown


def test_captured_batches_reach_every_engine(monkeypatch, tmp_path):
    started = []

    def process(arm, model, logs):
        started.append(arm.engine_arguments(model))
        return MadeUp(slow=False)

    monkeypatch.setattr(bench_engine, "ArmProcess", process)
    monkeypatch.setattr(MadeUp, "step", lambda self, step: None)
    bench_engine.start(1, (4, 8, 512), tmp_path, tmp_path)
    assert [arguments["compilation_config"] for arguments in started] == [{"cudagraph_capture_sizes": [4, 8, 512]}] * 2


def test_both_arms_get_the_same_prompts(engines, tmp_path):
    run(tmp_path / "out.jsonl")
    stock, ladder = (engine.process.sent for engine in engines)
    assert stock == ladder


def test_engines_that_did_start_end_where_one_does_not(monkeypatch, tmp_path):
    made = []

    class Stubborn(MadeUp):
        def __init__(self, arm, model, folder):
            super().__init__(slow=False)
            self.arm = arm
            made.append(self)

        def step(self, step):
            if self.arm.gate and "#2" in self.arm.name:
                raise RuntimeError("arm on exited with 1")
            return {}

    monkeypatch.setattr(bench_engine, "ArmProcess", Stubborn)
    with pytest.raises(RuntimeError, match="exited with 1"):
        bench_engine.start(2, (), tmp_path, tmp_path)
    assert [process.closed for process in made] == [True] * 4
