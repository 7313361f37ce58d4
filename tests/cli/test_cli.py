# SPDX-License-Identifier: Apache-2.0
"""The command as a user runs it: a process of its own, its output and its exit status."""

import importlib.metadata
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import run_alone
from vllm_kda_prefill import versions

ROOT = Path(__file__).parents[2]
KEYS = {
    "prompt",
    "cached",
    "policy",
    "layout",
    "retained",
    "spans",
    "passes",
    "unreachable",
    "stock",
    "equal_retention_passes",
    "bytes_per_state",
}


@pytest.fixture
def plan(run):
    """The report of `kda-prefill plan --json`."""

    def call(*arguments: str) -> dict:
        done = run("plan", "--json", *arguments)
        assert done.status == 0, done.err
        return json.loads(done.out)

    return call


@pytest.mark.parametrize("arguments", [("plan", "--help"), ("doctor", "--help"), ("--version",)])
def test_what_needs_no_vllm_imports_neither_it_nor_torch(arguments):
    code = (
        f"import sys; sys.argv = ['kda-prefill', *{arguments!r}]\n"
        "from vllm_kda_prefill.cli import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert not {'torch', 'vllm'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_version_names_vllm_and_the_state_of_the_kernel(run, monkeypatch, tmp_path):
    out = run("--version").out
    assert f"vllm {importlib.metadata.version('vllm')}" in out.splitlines()
    compiler = tmp_path / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.touch(mode=0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    build = runpy.run_path(str(ROOT / "vllm" / versions.KERNEL_BUILD))
    if build["installed_library"]() is None:
        assert f"native kernel: compiled on its first use, by {compiler}" in run("--version").out


@pytest.mark.parametrize(
    ("library", "nvcc", "state"),
    [
        ("/x/lib.so", "/x/nvcc", "built ahead of time (/x/lib.so)"),
        (None, "/x/nvcc", "compiled on its first use, by /x/nvcc"),
        (None, None, "no nvcc to compile it with; set CUDA_HOME or put nvcc on PATH"),
    ],
)
def test_states_of_the_kernel(monkeypatch, library, nvcc, state):
    made_up = {"installed_library": lambda: library, "find_nvcc": lambda: nvcc}
    monkeypatch.setattr(versions.runpy, "run_path", lambda _: made_up)
    assert versions.kernel_state() == state


def test_exit_statuses_are_in_the_help(run):
    text = " ".join(run("--help").out.split())
    for status in ("0 done", "1 a wrong answer", "2 a value that cannot be used", "130 interrupted"):
        assert status in text


def test_a_shell_completes_commands_and_options():
    asked = {"_KDA_PREFILL_COMPLETE": "complete_bash", "COMP_WORDS": "kda-prefill pl", "COMP_CWORD": "1"}
    done = subprocess.run(
        [Path(sys.executable).with_name("kda-prefill")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | asked,
    )
    assert "plan" in done.stdout


@pytest.mark.parametrize("command", [[], ["plan"], ["layout"], ["doctor"], ["demo"], ["bench"], ["bench", "ab"]])
def test_help_of_each_command(run, command):
    done = run(*command, "--help")
    assert done.status == 0
    assert "Usage" in done.out


def test_report_of_the_original_layout(plan):
    report = plan("--prompt", "8192", "--dcp", "4", "--mtp", "3", "--policy", "replay")
    assert set(report) == KEYS
    assert report["layout"] == {"mamba_block": 512, "lookup": 512, "scheduler": 2048}
    assert report["retained"] == [4096, 6144, 7168, 7680]
    assert report["spans"] == [{"start": 0, "end": 8192, "checkpoints": [4096, 6144, 7168, 7680]}]
    assert report["passes"] == 1
    assert report["unreachable"] == []
    assert report["stock"] == {
        "spans": [{"start": 0, "end": 8192, "checkpoints": [7680]}],
        "retained": [7680],
        "passes": 1,
    }
    assert report["equal_retention_passes"] == 4
    # 34 KDA layers of 64 heads: fp32 states of 128 x 128, three bf16 rows of q, k and v.
    assert report["bytes_per_state"] == 34 * (64 * 128 * 128 * 4 + 3 * 3 * 64 * 128 * 2)


def test_report_after_a_prefix_hit(plan):
    report = plan("--prompt", "8192", "--cached", "4096", "--mtp", "0")
    assert report["spans"] == [{"start": 4096, "end": 8192, "checkpoints": [6144, 7168, 7680]}]
    assert report["stock"]["spans"][0]["start"] == 4096


def test_long_prompt_is_two_passes(plan):
    report = plan("--prompt", "16384")
    assert [(span["start"], span["end"]) for span in report["spans"]] == [(0, 8192), (8192, 16384)]
    assert report["retained"] == [8192, 12288, 14336, 15360, 15872]
    assert report["equal_retention_passes"] == 5


def test_other_block_sizes_and_shapes(plan, tmp_path):
    config = {
        "architectures": ["Glm5NextForCausalLM"],
        "model_type": "glm5_next",
        "text_config": {
            "model_type": "glm5_next_text",
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 3 + ["indexed_attention"],
            "mlp_layer_types": ["dense"] * 4,
            "linear_num_heads": 8,
            "num_nextn_predict_layers": 1,
        },
        "vision_config": {"model_type": "glm5_next_vision", "depth": 1},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = plan(*("--prompt", "3000", "--block-size", "256", "--mamba-block-size", "1024", "--model", str(tmp_path)))
    assert report["layout"] == {"mamba_block": 1024, "lookup": 256, "scheduler": 1024}
    assert report["bytes_per_state"] == 3 * (8 * 128 * 128 * 4 + 3 * 3 * 8 * 128 * 2)


def test_table_names_what_matters():
    done = run_alone("plan", "--dcp", "4", "--policy", "replay")
    assert done.status == 0
    assert done.err == ""
    assert "[0, 8,192)" in done.out
    assert "7,168" in done.out
    assert "stock needs 4 passes" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


def test_old_names_of_options_work_and_are_not_shown(run):
    for command, old, new in (
        ("ab", "--page", "--block"),
        ("growth", "--page", "--block"),
        ("trace", "--pages", "--blocks"),
    ):
        words = run("bench", command, "--help").out.split()
        assert new in words
        assert old not in words


def test_missing_folders_of_an_output_are_made(run, tmp_path):
    output = tmp_path / "new" / "folder" / "growth.jsonl"
    assert run("bench", "growth", "--lengths", "2048", "--page", "1024", "--output", str(output)).status == 0
    assert json.loads(output.read_text().splitlines()[0])["configuration"]["block_tokens"] == 1024
