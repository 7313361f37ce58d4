# SPDX-License-Identifier: Apache-2.0
"""What the measuring script hands to the benchmark, and the model it writes, without a server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "measure_h200.sh"
PARTS = ["all", "pair", "cold", "tight", "ranks"]


def run_script(part, folder, **environment):
    """Run the script in a folder, to write to its `out`."""
    return subprocess.run(
        [SCRIPT, part, "out", "60"],
        cwd=folder,
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def measure(part, folder, **environment):
    """The benchmark's arguments and its model's config, by a python that keeps them in place of running it."""
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -m ] || exec "{sys.executable}" "$@"\n'
        f'cp "$6/config.json" "{folder}"; printf "%s\\n" "$@" > "{folder}/arguments"\n'
    )
    python.chmod(0o755)
    ended = run_script(part, folder, PYTHON=str(python), **environment)
    assert ended.returncode == 0, ended.stderr
    return (folder / "arguments").read_text().splitlines(), json.loads((folder / "config.json").read_text())


def after(arguments, option):
    return arguments[arguments.index(option) + 1]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs_arms_of_the_real_shapes(part, tmp_path):
    arguments, config = measure(part, tmp_path)
    assert arguments[1:5] == ["vllm_kda_prefill", "bench", "ab", "--model"]
    assert after(arguments, "--arms").startswith("stock")
    assert after(arguments, "--output") == str(tmp_path / "out" / f"{part}.jsonl")
    assert config["text_config"]["num_attention_heads"] == 64
    assert config["text_config"]["index_topk"] == 2048
    assert ("--tensor-parallel-size" in arguments) == (part == "ranks")
    assert "--decode-context-parallel-size" not in arguments


@pytest.mark.parametrize(("ranks", "dcp"), [(2, 2), (4, 2), (4, 4)])
def test_ranks_with_dcp_take_what_stock_asks_for(ranks, dcp, tmp_path):
    arguments, config = measure("ranks", tmp_path, RANKS=str(ranks), DCP=str(dcp))
    assert after(arguments, "--arms") == "stock,ladder,equal"
    assert after(arguments, "--tensor-parallel-size") == str(ranks)
    assert after(arguments, "--decode-context-parallel-size") == str(dcp)
    assert after(arguments, "--kv-cache-dtype") == "fp8_ds_mla"
    assert after(arguments, "--cp-kv-cache-interleave-size") == "16"
    assert int(after(arguments, "--processors")) > ranks
    assert config["text_config"]["num_attention_heads"] == 16 * ranks
    assert config["text_config"]["index_topk"] // 16 == 512


def test_the_benchmark_takes_the_arguments(tmp_path):
    settings = {"PYTHON": sys.executable, "SERVE": "false", "PROCESSORS": "0", "RANKS": "4", "DCP": "4"}
    ended = run_script("ranks", tmp_path, **settings)
    assert "starting stock, ladder, equal" in ended.stderr
    assert "arm equal ended with 1" in ended.stderr


@pytest.mark.parametrize(
    ("part", "environment", "error"),
    [
        ("some", {}, "some: give all, pair, cold, tight or ranks"),
        (
            "ranks",
            {"RANKS": "2", "DCP": "4"},
            "RANKS=2 DCP=4: give RANKS 2 with DCP 1 or 2, or RANKS 4 with DCP 1, 2 or 4",
        ),
    ],
)
def test_what_is_not_measured_is_refused(part, environment, error, tmp_path):
    ended = run_script(part, tmp_path, PYTHON=sys.executable, **environment)
    assert ended.returncode == 2
    assert ended.stderr == f"error: {error}\n"
    assert not (tmp_path / "out").exists()
