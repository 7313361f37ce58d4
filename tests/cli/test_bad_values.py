# SPDX-License-Identifier: Apache-2.0
"""Values that the command refuses: one line that names the value, and exit status 2."""

from __future__ import annotations

import json
import sys

import pytest

from vllm_kda_prefill import console
from vllm_kda_prefill.cli import main
from vllm_kda_prefill.model_config import GLM_SHAPES, UnfitModelError, reading


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
