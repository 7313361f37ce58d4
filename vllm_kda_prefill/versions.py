# SPDX-License-Identifier: Apache-2.0
"""Versions of what is installed, told from files: neither torch nor vLLM is imported."""

from __future__ import annotations

import runpy
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

KERNEL_BUILD = Path("model_executor", "layers", "mamba", "ops", "kda_prefill", "build.py")


def versions() -> dict[str, str]:
    """Name -> version of this fork, of vLLM and of Python, and the state of the native kernel."""
    return {
        "vllm-kda-prefill": _installed("vllm-kda-prefill"),
        "vllm": _installed("vllm"),
        "python": sys.version.split()[0],
        "native kernel:": kernel_state(),
    }


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "(not installed)"


def kernel_state() -> str:
    """How the native kernel gets to the GPU: built already, on its first use, or not at all."""
    script = _build_script()
    if script is None:
        return "not installed"
    build = runpy.run_path(str(script))
    if library := build["installed_library"]():
        return f"built ahead of time ({library})"
    if nvcc := build["find_nvcc"]():
        return f"compiled on its first use, by {nvcc}"
    return "no nvcc to compile it with; set CUDA_HOME or put nvcc on PATH"


def _build_script() -> Path | None:
    """The kernel's build script beside this package in a checkout or a wheel, else in the installed vLLM."""
    folders = [Path(__file__).resolve().parents[1] / "vllm"]
    spec = find_spec("vllm")
    folders += map(Path, (spec and spec.submodule_search_locations) or ())
    return next((folder / KERNEL_BUILD for folder in folders if (folder / KERNEL_BUILD).is_file()), None)
