# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for every architecture it claims, without spills or local memory."""

from __future__ import annotations

import ctypes
import re
import subprocess

import pytest

from vllm.model_executor.layers.mamba.ops.kda_prefill import build, native
from vllm.model_executor.layers.mamba.ops.kda_prefill.base import HEAD_DIM
from vllm.v1.core.prefill_plan import CHECKPOINT_ALIGNMENT, MAX_CHECKPOINTS

NVCC = build.find_nvcc()
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc; none under CUDA_HOME, PATH or /usr/local/cuda")
KERNELS = {"prepare_kernel": 1, "recurrence_kernel": 4}


@needs_nvcc
@pytest.mark.parametrize("arch", ["9.0a", "12.1a"])
def test_kernels_compile_without_spills(arch, tmp_path):
    assert NVCC is not None
    command = build.compile_command(NVCC, [arch], tmp_path / "kernel.so", "-Xptxas", "-v")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "warning" not in result.stderr, result.stderr
    reports = re.findall(
        r"Compiling entry function '(\S+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers",
        result.stderr,
        re.DOTALL,
    )
    for kernel, count in KERNELS.items():
        assert sum(kernel in report[0] for report in reports) == count
    for name, stack, stores, loads, registers in reports:
        assert (stack, stores, loads) == ("0", "0", "0"), name
        # Threads of a block times registers must fit the 65,536 of a multiprocessor.
        threads = 288 if "recurrence" in name else 256
        assert threads * int(registers) <= 65536, name


@needs_nvcc
def test_a_compiler_error_is_reported(tmp_path, monkeypatch):
    (tmp_path / "kda_prefill.cu").write_text("not C++")
    monkeypatch.setattr(build, "source_dir", lambda: tmp_path)
    with pytest.raises(RuntimeError, match="nvcc failed on the native KDA prefill kernel"):
        build.build(["9.0a"], tmp_path / "kernel.so")
    assert not list(tmp_path.glob("*.so"))


@needs_nvcc
def test_the_launcher_and_the_library_agree(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    path = build.compiled_library((9, 0))
    assert path.is_relative_to(tmp_path)
    assert build.compiled_library((9, 0)) == path
    library = native._open(path)
    assert library.kda_prefill_params_bytes() == ctypes.sizeof(native._Params)
    # One record a chunk of 64 tokens: four operands of 64 x 128, ten 16 x 16 products, the decay.
    assert library.kda_prefill_record_bytes() == 2 * (4 * 64 * 128 + 10 * 16 * 16) + 4 * 128


def test_the_sources_and_the_launcher_share_their_constants():
    text = (build.source_dir() / "common.cuh").read_text(encoding="utf-8")
    constants = {name: int(value) for name, value in re.findall(r"constexpr int (k\w+) = (\d+);", text)}
    assert constants["kChunk"] == native.CHUNK_TOKENS
    assert constants["kMaxCheckpoints"] == MAX_CHECKPOINTS
    assert constants["kHeadDim"] == HEAD_DIM
    # A chunk may end at any checkpoint, so none may lie inside a gate block.
    assert constants["kBlock"] == CHECKPOINT_ALIGNMENT


def test_build_without_nvcc_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    with pytest.raises(RuntimeError, match="set CUDA_HOME or put nvcc on PATH"):
        build.build(["9.0a"], tmp_path / "kernel.so")


def test_architectures_the_kernel_cannot_run_on_are_skipped(tmp_path):
    command = build.compile_command("nvcc", ["8.0", "9.0", "12.1a", "12.1"], tmp_path / "kernel.so")
    assert [flag for flag in command if flag.startswith("-gencode")] == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_121a,code=sm_121a",
    ]
    with pytest.raises(ValueError, match=r"none of 8\.0, 10\.0a, Hopper, 9\.x runs .* TORCH_CUDA_ARCH_LIST"):
        build.compile_command("nvcc", ["8.0", "10.0a", "Hopper", "9.x"], tmp_path / "kernel.so")
