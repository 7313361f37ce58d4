# SPDX-License-Identifier: Apache-2.0
"""Each check of `kda-prefill doctor` in each colour that it can have: pure functions of what was found."""

import pytest

from vllm_kda_prefill.doctor import findings, hardware, installation, kernels
from vllm_kda_prefill.doctor.findings import Colour, Finding, exit_status, from_server, green, one_line, red, yellow

GIB = 2**30
SPARK = hardware.Gpus(1, "NVIDIA GB10", (12, 1), 120 * GIB, 115 * GIB, unified=True)
NONE = hardware.Gpus(problem="NVML reports no NVIDIA GPU")
LINKS = ("red", "yellow")


def check(finding: Finding, colour: str, message: str, hint: str = "") -> None:
    assert finding.colour == colour
    assert message in finding.message
    assert hint in finding.hint
    assert bool(finding.hint) == (colour in LINKS)


def test_a_finding_is_one_line_and_says_what_to_do():
    assert red("x", "a\n b\x1b[31m\udcff", "c").message == "a b\\x1b[31m\\udcff"
    assert len(one_line("9" * 5000)) == findings.LONGEST
    for colour in (Colour.RED, Colour.YELLOW):
        with pytest.raises(ValueError, match="says what to do"):
            Finding("x", colour, "message")


def test_one_red_line_is_exit_status_1():
    assert exit_status([green("a", "b"), yellow("a", "b", "c")]) == 0
    assert exit_status([green("a", "b"), red("a", "b", "c")]) == 1


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("the dtype is x: pass --dtype y", "the dtype is x", "pass --dtype y"),
        ("A='1: 2' is none; set it to 1", "A='1: 2' is none", "set it to 1"),
        ("no hint at all", "no hint at all", findings.DOCS),
    ],
)
def test_a_servers_line_is_parted_before_what_to_do(line, message, hint):
    found = from_server("x", line)
    assert (found.message, found.hint, found.colour) == (message, hint, "red")


@pytest.mark.parametrize(
    ("version", "colour", "message"),
    [
        ("0.33.0", "green", "vLLM 0.33.0"),
        ("0.33.0+cu130", "green", "0.33.0+cu130"),
        ("0.34.0", "red", "is 0.34.0, this fork needs 0.33.0"),
        (None, "red", "not installed"),
    ],
)
def test_version(version, colour, message):
    hint = "pip install vllm==0.33.0" if colour == "red" else ""
    check(installation.version_finding(version, "0.33.0"), colour, message, hint)


def test_sources():
    check(installation.source_finding([], 36, "0.33.0"), "green", "all 36 sources")
    found = installation.source_finding(["a:A", "b:B", "c:C", "d:D"], 36, "0.33.0")
    check(found, "red", "4 of 36 sources that the patches rely on differ: a:A, b:B, c:C and 1 more", "vllm==0.33.0")


def test_torch():
    check(installation.torch_finding("2.14", "13.0"), "green", "CUDA 13.0")
    check(installation.torch_finding("2.14+cpu", None), "red", "without CUDA", "requirements/runtime.txt")


@pytest.mark.parametrize(
    ("gpus", "assumed", "colour", "message", "hint"),
    [
        (SPARK, None, "green", "1 × NVIDIA GB10, SM121", ""),
        (SPARK, (12, 1), "green", "1 × NVIDIA GB10, SM121", ""),
        (NONE, (12, 1), "yellow", "checked as for SM121; here is no GPU", "on the host that serves"),
        (SPARK, (9, 0), "yellow", "checked as for SM90; here is 1 × NVIDIA GB10, SM121", "on the host that serves"),
        (NONE, None, "red", "NVML reports no NVIDIA GPU", "--capability 12.1"),
        (hardware.Gpus(1, "old", (8, 0)), None, "red", "old, SM80: no kernel exports states there", "SM90"),
        (hardware.Gpus(1, "odd"), None, "red", "compute capability of odd cannot be read", "--capability"),
        (hardware.Gpus(problem="OSError: libcuda\nis not there"), None, "red", "libcuda is not there", "run it where"),
    ],
)
def test_gpu(gpus, assumed, colour, message, hint):
    check(hardware.gpu_finding(gpus, assumed), colour, message, hint)


def test_ranks():
    check(hardware.ranks_finding(SPARK, 1, False), "green", "--tp 1 on a host of 1")
    check(hardware.ranks_finding(SPARK, 4, False), "yellow", "--tp 4 needs 4 GPUs, this host has 1", "pip install ray")
    assert not hardware.ranks_finding(SPARK, 4, True).hint.startswith("pip")


@pytest.mark.parametrize(
    ("gpus", "need", "colour", "message", "hint"),
    [
        (NONE, (0.9, None), "yellow", "not known", "where the server runs"),
        (SPARK, (0.9, None), "yellow", "the weights are not here", "--model"),
        (SPARK, (0.9, 45 * GIB), "green", "shared with the host, 115.0 GiB of 120.0 GiB free, vLLM asks for 108.0", ""),
        (SPARK, (0.9, 45 * GIB, 900_000, 131_072), "green", "leave 900,000 tokens of cache at most", ""),
        (SPARK, (0.99, 45 * GIB), "red", "vLLM asks for 118.8 GiB", "--gpu-memory-utilization 0.95, or free the page"),
        (SPARK, (0.9, 180 * GIB), "red", "weights take 180.0 GiB a rank", "more --tp ranks"),
        (SPARK, (0.9, 45 * GIB, 900_000, 1_048_576), "red", "900,000 tokens", "--max-model-len below 900,000"),
    ],
)
def test_memory(gpus, need, colour, message, hint):
    check(hardware.memory_finding(gpus, hardware.Need(*need)), colour, message, hint)


def test_a_gpu_with_its_own_memory_is_not_told_of_the_page_cache():
    full = hardware.Gpus(1, "NVIDIA H200", (9, 0), 140 * GIB, 20 * GIB)
    found = hardware.memory_finding(full, hardware.Need(0.9))
    check(found, "red", "20.0 GiB of 140.0 GiB free", "--gpu-memory-utilization 0.14")
    assert "cache" not in found.hint


@pytest.mark.parametrize(
    ("backend", "choices", "missing", "colour", "message", "hint"),
    [
        ("auto", {"flashkda": ""}, {}, "green", "flashkda exports states (first choice of auto on this GPU)", ""),
        ("native", {"native": ""}, {}, "green", "native exports states (asked for; built ahead of time)", ""),
        (
            "auto",
            {"native": "", "flashkda": ""},
            {"native": "no nvcc"},
            "yellow",
            "flashkda exports states; native is passed over (no nvcc)",
            "what it lacks",
        ),
        (
            "auto",
            {"flashkda": "head size is 64"},
            {},
            "red",
            "flashkda is passed over (head size is 64)",
            "stock wheel",
        ),
        (
            "b12x",
            {"b12x": ""},
            {"b12x": "not installed"},
            "red",
            "(not installed)",
            """leave "kda_prefill_backend" out""",
        ),
    ],
)
def test_kernel(backend, choices, missing, colour, message, hint):
    check(kernels.kernel_finding(backend, choices, missing, "built ahead of time"), colour, message, hint)


@pytest.mark.parametrize(
    ("state", "lacks"),
    [
        ("built ahead of time (/x/lib.so)", ""),
        ("compiled on its first use, by /x/nvcc", ""),
        ("no nvcc to compile it with; set CUDA_HOME", "no nvcc to compile it with; set CUDA_HOME"),
    ],
)
def test_what_the_native_kernel_lacks(state, lacks):
    assert kernels.missing_parts(state)["native"] == lacks
