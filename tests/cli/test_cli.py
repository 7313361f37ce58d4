# SPDX-License-Identifier: Apache-2.0
"""The command as a user runs it: a process of its own, its output and its exit status."""

import importlib.metadata
import json
import logging
import os
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_kda_prefill import console, versions
from vllm_kda_prefill.cli import main
from vllm_kda_prefill.model_config import GLM_SHAPES, UnfitModelError, reading

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


@dataclass
class Done:
    """How a command ended: its exit status, and what it printed."""

    status: int
    out: str
    err: str


def run_alone(*arguments: str) -> Done:
    """Run a command in a Python of its own, as a user does."""
    done = subprocess.run(
        [sys.executable, "-m", "vllm_kda_prefill", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"},
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command in this process, which imports vLLM once for all tests."""

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["kda-prefill", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        printed = capsys.readouterr()
        return Done(int(stop.value.code or 0), printed.out, printed.err)

    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    yield call
    logging.disable(logging.NOTSET)


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
    assert report["unreachable"] == [7168]
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
    assert "7,168*" in done.out
    assert "stock needs 4 passes" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "named", "hint"),
    [
        (["plan", "--prompt", "0"], "--prompt 0", "1 to 262143"),
        (["plan", "--prompt", "many"], "--prompt many", "give a whole number"),
        (["plan", "--budget", "1.5"], "--budget 1.5", "give a whole number"),
        (["bench", "reuse", "--traces", "0"], "--traces 0", "give at least 1"),
        (["bench", "growth", "--mtp", "9"], "--mtp 9", "give at most 8"),
        (["bench", "reuse", "--branching", "2"], "--branching 2", "numbers from 0 to 1"),
        (["demo", "--dcp", "x"], "--dcp x", "kda-prefill demo --help"),
        (["plan", "--dcp", "3"], "--dcp 3", "1, 2, 4 or 8"),
        (["plan", "--mtp", "-1"], "--mtp -1", "0 to 8"),
        (["plan", "--block-size", "24"], "--block-size 24", "multiple of 16"),
        (["plan", "--mamba-block-size", "768"], "--mamba-block-size 768", "multiple of --block-size, 512"),
        (["plan", "--budget", "2"], "--budget 2", "at least 4"),
        (["plan", "--cached", "8192"], "--cached 8192", "0 to 8191"),
        (["plan", "--cached", "4000"], "4000", "3584 or 4096"),
        (["plan", "--policy", "all"], "all", "'ladder', 'replay'"),
        (["plan", "--model", "/nowhere"], "/nowhere", "config.json"),
        (["demo", "--plot", "picture.txt"], "picture.txt", ".png"),
        (["demo", "--plot", "/nowhere/picture.png"], "/nowhere", "folder"),
        (["serve"], "serve", "--help"),
        (["doctor", "--capability", "x"], "--capability 'x'", "give one like 12.1"),
        (["doctor", "--gpu-memory-utilization", "92"], "--gpu-memory-utilization 92", "at most 1"),
        (["doctor", "--tp", "0"], "--tp 0", "at least 1"),
        (["plan", "--nonsense"], "--nonsense", "--help"),
        (["plan", "--prompt"], "--prompt", "see kda-prefill plan --help"),
        (["bench", "growth", "--mtp"], "--mtp", "see kda-prefill bench growth --help"),
        (["plan", "--model", ""], "--model", "'' is no path"),
        (["layout", "--model", ""], "--model", "'' is no path"),
        (["doctor", "--model", ""], "--model ''", "leave it out"),
        (["layout", "--mamba", "512"], "--mamba 512", "give --target and --mamba together"),
        (["layout", "--memory", "abc"], "--memory: 'abc'", "give one like 24GiB"),
        (["layout", "--memory", "9" * 400], "--memory", "give one like 24GiB"),
        (["layout", "--tp", "3"], "--tp 3", "divisible by tensor parallel size (3) (--verbose"),
        (["layout", "--tp", "1000000"], "--tp 1000000", "divisible by tensor parallel size (1000000)"),
        (["layout", "--max-model-len", str(10**12)], "--max-model-len 1000000000000", "derived max_model_len"),
        (["layout", "--kv-cache-dtype", "xyz"], "--kv-cache-dtype xyz", "'] (--verbose shows where)"),
        (["bench", "growth", "--block", "17"], "--block 17", "multiple of 16"),
        (["bench", "growth", "--page", "17"], "--block 17", "multiple of 16"),
        (["bench", "growth", "--lengths", "300000"], "--lengths 300000", "at most 262143"),
        (["bench", "ab", "--model", "m", "--page", "17"], "--block 17", "multiple of 16"),
        (["bench", "report", "/nowhere"], "/nowhere", "name the folder"),
        (["bench", "prefill", "notaurl"], "'notaurl'", "http://host:8000"),
        (["bench", "decode", "http://"], "'http://'", "http://host:8000"),
        *(
            (["bench", *command, "--output", "/dev/null/x"], "--output /dev/null/x", "that you can write to")
            for command in (
                ["prefill", "http://127.0.0.1:9"],
                ["growth"],
                ["reuse"],
                ["report", "/nowhere"],
                ["ab", "--model", "m"],
            )
        ),
        (["bench", "growth", "--output", "/dev"], "--output /dev", "name a file"),
    ],
)
def test_bad_value_is_one_line_and_status_2(run, arguments, named, hint):
    done = run(*arguments)
    assert done.status == 2
    assert done.out == ""
    (line,) = done.err.splitlines()
    assert line.startswith("error: ")
    assert named in line
    assert hint in line
    assert "pydantic" not in line
    assert "validation error" not in line


@pytest.mark.parametrize("command", ["plan", "layout"])
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ({"hidden_size": "abc"}, "'hidden_size' expected int, got str (value: 'abc')"),
        ({"num_hidden_layers": -3}, "`num_hidden_layers` (-3)"),
        ("hello", "'text_config' with value 'hello'"),
    ],
)
def test_a_bad_value_in_a_config_is_one_line(run, tmp_path, caplog, command, text, found):
    changed = GLM_SHAPES["text_config"] | text if isinstance(text, dict) else text
    (tmp_path / "config.json").write_text(json.dumps(GLM_SHAPES | {"text_config": changed}))
    done = run(command, "--mtp", "0", "--model", str(tmp_path))
    assert (done.status, done.out, caplog.text) == (2, "", "")
    (line,) = done.err.splitlines()
    assert line.startswith(f"error: --model {tmp_path}: vLLM cannot read its config.json: ")
    assert found in line


def test_only_a_given_model_is_to_blame_for_what_is_raised(tmp_path):
    for folder, kind in ((tmp_path, UnfitModelError), (None, KeyError)):
        with pytest.raises(kind), reading(folder):
            raise KeyError("head_dim")
    with pytest.raises(NotImplementedError), reading(tmp_path):
        raise NotImplementedError


def test_a_fault_of_this_fork_keeps_its_traceback(run, monkeypatch):
    from vllm_kda_prefill.plan import report

    def fault(*_: object) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr(report, "make_report", fault)
    monkeypatch.setattr(sys, "argv", ["kda-prefill", "plan"])
    with pytest.raises(KeyError, match="a fault"):
        main()


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


def test_a_block_is_a_multiple_of_what_a_checkpoint_is():
    from vllm.v1.core.prefill_plan import CHECKPOINT_ALIGNMENT

    assert console.ALIGNMENT == CHECKPOINT_ALIGNMENT


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        "[]",
        '{"architectures": ["LlamaForCausalLM"]}',
        '{"architectures": [5]}',
        '{"architectures": ["Glm5NextForCausalLM"], "model_type": "m", "text_config": null}',
        '{"architectures": ["Glm5NextForCausalLM"], "model_type": "m", "num_nextn_predict_layers": "x"}',
    ],
)
def test_unfit_model_is_one_line(run, tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    done = run("plan", "--model", str(tmp_path))
    assert done.status == 2
    (line,) = done.err.splitlines()
    assert "GLM5Next" in line


def test_drafts_need_a_draft_layer(run, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Glm5NextForCausalLM"], "model_type": "glm5_next_text"}')
    done = run("plan", "--mtp", "2", "--model", str(tmp_path))
    assert done.status == 2
    assert "--mtp 2" in done.err
    assert "--mtp 0" in done.err


def test_a_picture_needs_a_file(run, tmp_path):
    (tmp_path / "dir.png").mkdir()
    done = run("demo", "--plot", str(tmp_path / "dir.png"))
    assert done.status == 2
    assert "it is a folder; name a file" in done.err
