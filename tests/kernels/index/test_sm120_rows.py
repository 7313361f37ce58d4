# SPDX-License-Identifier: Apache-2.0
"""The DeepGEMM in vLLM's wheel reads 32 rows of a block at once on SM12x, as our patch lets vLLM say.

Nobody here has a GPU of SM12x. Its kernel is compiled for SM120 and SM121; the host code runs, told that the GPU is a
GB10; and on Hopper, which has every instruction of it, the kernel runs built for that.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm.model_executor.layers.mamba.ops.kda_prefill.build import find_nvcc

NVCC = find_nvcc()
pytestmark = pytest.mark.skipif(NVCC is None, reason="needs nvcc; none under CUDA_HOME, PATH or /usr/local/cuda")
HERE = Path(__file__).parent
SHARED_BYTES_OF_SM12X = 99 * 1024
SMS = 48
SHAPES = [(32, 1), (64, 1), (32, 2), (64, 2)]
"""Query heads, and queries of a request that are scored at once. On SM12x vLLM scores one, or two with one draft token;
more it takes apart."""


def stages(rows: int, heads: int, queries: int) -> int:
    """Blocks in flight: two where three would not fit the shared memory of SM12x."""
    return 2 if (rows, heads, queries) == (32, 64, 2) else 3


def include() -> Path:
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None
    assert vllm.submodule_search_locations is not None
    folders = (Path(location) / "third_party/deep_gemm/include" for location in vllm.submodule_search_locations)
    return next(folder for folder in folders if folder.is_dir())


def nvcc(*arguments: str) -> str:
    assert NVCC is not None
    result = subprocess.run([NVCC, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stderr


def library(source: str, output: Path, *flags: str) -> Path:
    """A shared library of one of this folder's sources, without CUDA's runtime in it."""
    nvcc("-shared", "-Xcompiler", "-fPIC", "--cudart", "none", *flags, "-o", str(output), str(HERE / source))
    return output


def run(device: str, shape: tuple[int, int, int], **environment: Any) -> list[dict[str, Any]]:
    """Lines that `paged_logits.py` prints, for blocks of so many rows, query heads and queries of a request."""
    result = subprocess.run(
        [sys.executable, str(HERE / "paged_logits.py"), device, *map(str, shape)],
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """Runs the host code as on a GB10, without a GPU."""
    folder = tmp_path_factory.mktemp("host")
    preload = library("pretend_device.cpp", folder / "pretend_device.so", "-DNO_GPU")
    library("recording_driver.cpp", folder / "libcuda.so.1")

    def score(rows: int, heads: int, queries: int) -> list[dict[str, Any]]:
        return run(
            "cpu",
            (rows, heads, queries),
            LD_PRELOAD=preload,
            LD_LIBRARY_PATH=folder,
            DG_JIT_CACHE_DIR=folder / "cache",
            PRETEND_SMS=SMS,
        )

    return score


@pytest.mark.parametrize("arch", ["120a", "121a"])
def test_the_kernel_compiles_with_tiles_of_32_and_of_64_rows(arch, tmp_path):
    kernels = [
        f"&deep_gemm::sm120_fp8_paged_mqa_logits<{queries}, {heads}, 128, {rows}, true, false, 2, "
        f"{stages(rows, heads, queries)}, 128, 128, 256, float>"
        for heads, queries in SHAPES
        for rows in (32, 64)
    ]
    source = tmp_path / "kernels.cu"
    source.write_text(
        "#include <deep_gemm/impls/sm120_fp8_paged_mqa_logits.cuh>\n"
        f"void* kernels[] = {{{', '.join(f'reinterpret_cast<void*>({kernel})' for kernel in kernels)}}};\n"
    )
    report = nvcc(
        *("-std=c++20", "-O3", "--expt-relaxed-constexpr", "--expt-extended-lambda", "-Xptxas", "-v", "--cubin"),
        *(f"-I{include()}", f"-gencode=arch=compute_{arch},code=sm_{arch}"),
        *("-o", str(tmp_path / "kernels.cubin"), str(source)),
    )
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert spills == [("0", "0", "0")] * len(kernels), report


@pytest.mark.parametrize(("rows", "heads", "queries"), [(32, 32, 1), (32, 64, 1), (32, 64, 2), (64, 32, 1)])
def test_the_host_of_a_gb10_takes_blocks_of_32_rows(host, rows, heads, queries):
    lines = host(rows, heads, queries)
    kernels = [line["path"] for line in lines if line["what"] == "kernel"]
    assert ["metadata" in path for path in kernels] == [True, False]
    source = (Path(kernels[1]).parent / "kernel.cu").read_text()
    arguments = re.search(r"sm120_fp8_paged_mqa_logits<\s*([^>]*?)\s*>", source)
    assert arguments is not None
    assert re.split(r",\s*", arguments[1]) == [
        *map(str, (queries, heads, 128, rows)),
        *("true", "false"),
        *map(str, (2, stages(rows, heads, queries), 128, 128, 256)),
        "float",
    ]
    # One tensor map each of queries, rows, scales, weights; a tile of rows never leaves its block.
    maps = [line for line in lines if line["what"] == "tensor map"]
    blocks = maps[1]["sizes"][2]
    stride = 5 * rows * 132
    assert maps[1] == {
        "what": "tensor map",
        "sizes": [128, rows, blocks],
        "strides": [128, stride],
        "box": [128, rows, 1],
    }
    assert maps[2] == {"what": "tensor map", "sizes": [rows, blocks], "strides": [stride], "box": [rows, 1]}
    launch = [line for line in lines if line["what"] == "launch"][-1]
    assert launch["blocks"] == SMS
    assert launch["threads"] == 384
    assert launch["shared_bytes"] <= SHARED_BYTES_OF_SM12X


def test_the_host_of_a_gb10_takes_no_other_size(host):
    with pytest.raises(AssertionError, match="block_kv == 32 or block_kv == 64"):
        host(16, 32, 1)


@pytest.fixture(scope="module")
def hopper(tmp_path_factory):
    """Runs the SM12x kernel on Hopper, through the host code of a GB10."""
    folder = tmp_path_factory.mktemp("hopper")
    preload = library("pretend_device.cpp", folder / "pretend_device.so")
    headers = folder / "include"
    shutil.copytree(include() / "deep_gemm", headers / "deep_gemm")
    for header in headers.rglob("*.cuh"):
        text = header.read_text()
        if "__CUDA_ARCH__ >= 1200" in text:
            header.write_text(text.replace("__CUDA_ARCH__ >= 1200", "__CUDA_ARCH__ >= 900"))

    def score(rows: int, heads: int, queries: int) -> dict[str, Any]:
        (line,) = run(
            "cuda",
            (rows, heads, queries),
            LD_PRELOAD=preload,
            DG_JIT_CACHE_DIR=folder / "cache",
            DG_JIT_NVCC_COMPILER=HERE / "nvcc_for_hopper.sh",
            REAL_NVCC=NVCC,
            HOPPER_INCLUDE=headers,
            PRETEND_SMS=SMS,
        )
        return line

    return score


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "queries"), SHAPES)
def test_tiles_of_32_rows_score_as_the_reference_and_tiles_of_64(hopper, heads, queries):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("builds the kernel for Hopper")
    found = hopper(32, heads, queries)
    assert found["error"] < 5e-3
    assert found["error of swapped blocks"] > 0.1
    assert found["as with the other size"]
