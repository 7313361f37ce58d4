# SPDX-License-Identifier: Apache-2.0
"""All checks together: what a server would refuse is red, in the server's words, and nothing is a traceback."""

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from tests.glm_engines import aligned

from vllm_kda_prefill.layer_stubs import as_gpu  # isort: skip  (the platform before vLLM)

from vllm.kda_prefill_variables import GATE, SPLIT_MAMBA, SPLIT_TARGET
from vllm.plugins.kda_prefill_coalescing import index_rows
from vllm.plugins.kda_prefill_coalescing.config_check import unmet_conditions
from vllm.plugins.kda_prefill_coalescing.upstream_sources import VLLM_VERSION
from vllm_kda_prefill.doctor import engine, examine, hardware, variables
from vllm_kda_prefill.doctor.command import read_capability
from vllm_kda_prefill.doctor.findings import Finding, exit_status
from vllm_kda_prefill.doctor.table import print_findings
from vllm_kda_prefill.model_config import GLM_SHAPES

GIB = 2**30
GB10 = hardware.Gpus(1, "NVIDIA GB10", (12, 1), 120 * GIB, 115 * GIB, unified=True)


def server(flags: dict[str, Any]) -> engine.Flags:
    """TP4 with three draft tokens and an fp8 cache, and what `flags` say else."""
    given: dict[str, Any] = {"tp": 4, "mtp": 3, "kv_cache_dtype": "fp8"}
    return engine.Flags(**given | flags)


@pytest.fixture
def spark(monkeypatch):
    """A host with one GB10, the gate on and blocks of 512 tokens; called with a server's flags."""
    for name in variables.OURS:
        monkeypatch.delenv(name, raising=False)
    for name, value in ((GATE, "1"), (SPLIT_TARGET, "512"), (SPLIT_MAMBA, "512")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(hardware, "find_gpus", lambda: GB10)

    def call(capability: Any = None, **flags: Any) -> list[Finding]:
        return examine.examine(server(flags), capability)

    return call


def of(findings: list[Finding], check: str, colour: str) -> list[str]:
    return [finding.message for finding in findings if (finding.check, finding.colour) == (check, colour)]


def test_what_four_sparks_serve_today_has_no_red_line(spark):
    findings = spark()
    assert exit_status(findings) == 0, [finding for finding in findings if finding.colour == "red"]
    (blocks,) = of(findings, "blocks", "green")
    assert "lookup 512, scheduler 512; 8,192 tokens keep 4,096 6,144 7,168 7,680" in blocks
    assert of(findings, "kernel", "green") == ["flashkda exports states (first choice of auto on this GPU)"]
    assert len(of(findings, "configuration", "green")) == 1
    assert [line for line in of(findings, "gpu", "green") if "GB10, SM121" in line]


@pytest.mark.parametrize(
    ("flags", "capability"),
    [
        ({"dcp": 4}, None),
        ({"dcp": 4, "interleave": 48}, (9, 0)),
        ({"dcp": 2, "interleave": 1024, "kv_cache_dtype": "fp8_ds_mla"}, (9, 0)),
    ],
)
def test_the_doctors_red_lines_are_the_servers(spark, flags, capability):
    findings = spark(capability, **flags)
    major, minor = capability or (12, 1)
    with as_gpu(major, minor), index_rows.bound():
        config = engine.make_config(server(flags), None)
        lines = list(unmet_conditions(config))
    said = of(findings, "configuration", "red")
    assert lines
    assert len(said) == len(lines)
    assert all(line.startswith(message) for line, message in zip(lines, said, strict=True))
    assert exit_status(findings) == 1


def test_the_doctors_blocks_are_the_workers(spark, monkeypatch):
    for sizes, dtype, capability in ((("auto", "auto"), "fp8", 9), ((512, 1536), "auto", 9), ((512, 1024), "fp8", 12)):
        monkeypatch.setenv(SPLIT_TARGET, str(sizes[0]))
        monkeypatch.setenv(SPLIT_MAMBA, str(sizes[1]))
        with monkeypatch.context() as gate:
            gate.setenv(GATE, "0")
            layout = engine.measure_layout(engine.Flags(tp=4, kv_cache_dtype=dtype), None, (capability, 0))
            if capability == 9:
                config = aligned(4, 1, dtype, max_model_len=None)
                assert layout.sizes == (config.cache_config.block_size, config.cache_config.mamba_block_size)
        (found,) = engine.block_findings(layout)
        assert found.colour == ("yellow" if sizes[1] == 1536 else "green")


def test_blocks_that_the_gate_refuses_are_named_once(spark, monkeypatch):
    monkeypatch.delenv(SPLIT_TARGET)
    monkeypatch.delenv(SPLIT_MAMBA)
    findings = spark()
    assert [message for message in of(findings, "configuration", "red") if "Mamba blocks of 2560 tokens" in message]
    assert not [finding for finding in findings if finding.check == "blocks"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"tp": 6}, "must be divisible by tensor parallel size (6)"),
        ({"tp": 128}, "must be divisible by tensor parallel size (128)"),
        ({"dcp": 3}, "tp_size=4 must be divisible by dcp_size=3"),
        ({"kv_cache_dtype": "fp9\n"}, "fp9"),
        ({"attention_backend": "[/]"}, "[/]"),
    ],
)
def test_flags_that_vllm_refuses_are_one_red_line(spark, flags, said):
    (message,) = of(spark(**flags), "configuration", "red")
    assert message.startswith("vLLM refuses the flags: ")
    assert said in message


def test_a_block_size_that_contradicts_is_red(spark):
    (message,) = of(spark(block_size=1024), "configuration", "red")
    assert message.startswith("--block-size 1024 contradicts")


@pytest.mark.parametrize("backend", ["b12", "triton", "b12x"])
def test_backends_that_cannot_be_used_are_one_red_line(spark, backend):
    findings = spark((9, 0), backend=backend)
    assert len(of(findings, "kernel", "red")) == 1
    assert len(of(findings, "configuration", "green")) == 1


def test_a_host_without_a_gpu_says_so_and_checks_the_rest(spark, monkeypatch):
    monkeypatch.setattr(hardware, "find_gpus", lambda: hardware.Gpus(problem="NVML reports no NVIDIA GPU"))
    findings = spark()
    assert [finding.check for finding in findings if finding.colour == "red"] == ["gpu"]
    assert len(of(findings, "kernel", "yellow")) == 1
    assert len(of(findings, "blocks", "green")) == 1


def test_hostile_variables_are_a_red_line_each(spark, monkeypatch, capsys):
    hostile = {GATE: "[/]\n", SPLIT_TARGET: "9" * 5000, SPLIT_MAMBA: "\x1b[31m", "VLLM_BATCH_INVARIANT": "abc"}
    for name, value in hostile.items():
        monkeypatch.setenv(name, value)
    findings = spark()
    reds = [finding.message for finding in findings if finding.colour == "red"]
    assert len(reds) == len(hostile)
    assert all(any(name in message for message in reds) for name in hostile)
    print_findings(findings)
    printed = capsys.readouterr().out
    assert "\x1b[31m" not in printed
    assert f"{len(hostile)} red: a server would not start with the gate on" in printed


@pytest.mark.parametrize("name", ["/nowhere", "a/b/c\n//", "zai-org/GLM-not-downloaded"])
def test_a_model_that_is_not_there_is_red(spark, name):
    assert len(of(spark(model=name), "model", "red")) == 1


def test_weights_count(spark, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GLM_SHAPES))
    assert engine.weight_bytes(tmp_path, 4) is None
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(176 * GIB)  # Sparse: takes no disk.
    assert engine.weight_bytes(tmp_path, 4) == 44 * GIB
    findings = spark(model=str(tmp_path), max_model_len=131072)
    (memory,) = of(findings, "memory", "green")
    assert "weights take 44.0 GiB a rank and leave" in memory
    assert len(of(spark(model=str(tmp_path), tp=1), "memory", "red")) == 1


def test_another_vllm_ends_the_checks(monkeypatch):
    monkeypatch.setattr(examine, "installed_vllm", lambda: "0.34.0")
    (found,) = examine.examine(engine.Flags(), None)
    assert (found.check, found.colour) == ("vllm", "red")
    assert examine.WANTED == VLLM_VERSION


def test_an_import_that_fails_is_a_red_line(monkeypatch):
    monkeypatch.setattr(examine, "import_problem", lambda: "ValueError: VLLM_X")
    *_, found = examine.examine(engine.Flags(), None)
    assert (found.colour, found.message) == ("red", "vLLM cannot be imported: ValueError: VLLM_X")


def test_memory_is_the_hosts_where_nvml_has_no_figures(monkeypatch):
    class NVMLError(Exception):
        pass

    def unsupported(handle: object) -> Any:
        raise NVMLError

    figures = SimpleNamespace(total=140, free=100)
    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: figures,
    )
    platform: Any = SimpleNamespace(device_id_to_physical_device_id=lambda index: index)
    monkeypatch.setattr("vllm.utils.import_utils.import_pynvml", lambda: nvml)
    assert hardware._memory(platform) == (140, 100, False)
    nvml.nvmlDeviceGetMemoryInfo = unsupported
    total, free, unified = hardware._memory(platform)
    assert unified
    assert total is not None
    assert 0 < (free or 0) < total


def test_this_host_is_asked_without_a_traceback():
    gpus = hardware.find_gpus()
    assert bool(gpus.problem) == (gpus.count == 0)


@pytest.mark.parametrize(
    ("text", "value"),
    [("", None), ("12.1", (12, 1)), ("12", (12, 0)), ("121", (12, 1)), ("90", (9, 0)), ("9", (9, 0)), ("10", (10, 0))],
)
def test_capability(text, value):
    assert read_capability(text) == value


@pytest.mark.parametrize("text", ["x", "12.", "1234", "12.10", "-9", "²"])
def test_no_capability(text):
    with pytest.raises(typer.BadParameter, match="give one like 12"):
        read_capability(text)


def test_the_command_prints_json_and_ends_with_the_exit_status():
    command = [sys.executable, "-m", "vllm_kda_prefill", "doctor", "--json", "--tp", "4", "--dcp", "4"]
    done = subprocess.run([*command, "--capability", "12.1"], capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert done.returncode == report["exit_status"] == 1
    assert all(finding["colour"] == "green" or finding["hint"] for finding in report["findings"])
