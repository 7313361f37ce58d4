# SPDX-License-Identifier: Apache-2.0
"""The command as a user runs it: a process of its own, its output and its exit status."""

import json
import logging
import os
import subprocess
import sys

import pytest

from vllm_kda_prefill.cli import main

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


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from vllm_kda_prefill.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"},
    )


@pytest.fixture
def plan(monkeypatch, capsys):
    """`kda-prefill plan --json` in this process, which imports vLLM once for all tests."""

    def call(*arguments: str) -> dict:
        monkeypatch.setattr(sys, "argv", ["kda-prefill", "plan", "--json", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 0
        return json.loads(capsys.readouterr().out)

    yield call
    logging.disable(logging.NOTSET)


def test_help_imports_neither_torch_nor_vllm():
    code = (
        "import sys; sys.argv = ['kda-prefill', 'plan', '--help']\n"
        "from vllm_kda_prefill.cli import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert not {'torch', 'vllm'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--mamba-block-size" in done.stdout


@pytest.mark.parametrize("command", [[], ["plan"], ["demo"]])
def test_help_of_each_command(command):
    done = run(*command, "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout


def test_report_of_the_original_layout(plan):
    report = plan("--prompt", "8192", "--dcp", "4", "--mtp", "3", "--policy", "replay")
    assert set(report) == KEYS
    assert report["layout"] == {"physical": 512, "lookup": 512, "scheduler": 2048}
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


def test_other_page_sizes_and_shapes(plan, tmp_path):
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
    assert report["layout"] == {"physical": 1024, "lookup": 256, "scheduler": 1024}
    assert report["bytes_per_state"] == 3 * (8 * 128 * 128 * 4 + 3 * 3 * 8 * 128 * 2)


def test_table_names_what_matters():
    done = run("plan", "--dcp", "4", "--policy", "replay")
    assert done.returncode == 0
    assert done.stderr == ""
    assert "[0, 8,192)" in done.stdout
    assert "7,168*" in done.stdout
    assert "stock needs 4 passes" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "named", "hint"),
    [
        (["plan", "--prompt", "0"], "--prompt 0", "1 to 262143"),
        (["plan", "--prompt", "many"], "--prompt many", "whole number"),
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
        (["plan", "--nonsense"], "--nonsense", "--help"),
    ],
)
def test_bad_value_is_one_line_and_status_2(arguments, named, hint):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert named in line
    assert hint in line


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
def test_unfit_model_is_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    done = run("plan", "--model", str(tmp_path))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "GLM5Next" in line


def test_drafts_need_a_draft_layer(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Glm5NextForCausalLM"], "model_type": "glm5_next_text"}')
    done = run("plan", "--mtp", "2", "--model", str(tmp_path))
    assert done.returncode == 2
    assert "--mtp 2" in done.stderr
    assert "--mtp 0" in done.stderr


def test_a_picture_needs_a_file(tmp_path):
    (tmp_path / "dir.png").mkdir()
    done = run("demo", "--plot", str(tmp_path / "dir.png"))
    assert done.returncode == 2
    assert "it is a folder; name a file" in done.stderr


def test_demo_draws_and_checks_every_answer(tmp_path):
    picture = tmp_path / "demo.png"
    done = run("demo", "--json", "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["all_equal"] is True
    assert [turn["passes"] for turn in result["coalesced"]] == [1] * 7
    assert sum(turn["passes"] for turn in result["stock"]) == 11
    assert 10_000 < picture.stat().st_size < 200_000
