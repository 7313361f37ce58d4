# SPDX-License-Identifier: Apache-2.0
"""Build of the native kernel: ahead of time from `setup.py`, else on first use into a cache folder.

The library has a C interface and needs nothing of PyTorch, so nvcc alone builds it in seconds.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
LIBRARY_NAME = "libkda_prefill.so"
DEFAULT_ARCHS = ("9.0a", "12.0a", "12.1a")
_ARCHS = {"9.0": "90a", "12.0": "120a", "12.1": "121a"}


def source_dir() -> Path:
    """Folder of the CUDA sources: inside the installed package, or `csrc/kda_prefill` of a checkout."""
    for folder in (PACKAGE / "csrc", PACKAGE.parents[5] / "csrc" / "kda_prefill"):
        if (folder / "kda_prefill.cu").is_file():
            return folder
    raise FileNotFoundError("the CUDA sources of the native KDA prefill kernel are not installed")


def find_nvcc() -> str | None:
    """Path of nvcc: under `CUDA_HOME`, on `PATH`, or in `/usr/local/cuda`."""
    home = os.environ.get("CUDA_HOME")
    candidates = [f"{home}/bin/nvcc" if home else None, shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def requested_archs() -> tuple[str, ...]:
    """Architectures of `TORCH_CUDA_ARCH_LIST` the kernel supports, or the default ones."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").replace("+PTX", "").split()
    return tuple(listed) or DEFAULT_ARCHS


def compile_command(nvcc: str, archs: Sequence[str], output: Path, *extra: str) -> list[str]:
    """The nvcc call that builds a shared library for `archs` such as `"9.0a"`.

    Raises:
        ValueError: None of them can run the kernel.
    """
    codes = []
    for arch in archs:
        number = arch.rstrip("af")
        code = _ARCHS.get(number if "." in number else f"{number}.0")
        if code and code not in codes:
            codes.append(code)
    if not codes:
        raise ValueError(
            f"none of {', '.join(archs)} runs the native KDA prefill kernel; name {' or '.join(_ARCHS)} in "
            "TORCH_CUDA_ARCH_LIST, or unset it"
        )
    targets = [f"-gencode=arch=compute_{code},code=sm_{code}" for code in codes]
    flags = ["-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC", *targets, *extra]
    return [nvcc, *flags, "-o", str(output), str(source_dir() / "kda_prefill.cu")]


def build(archs: Sequence[str] | None = None, output: Path | None = None) -> Path:
    """Compile the kernel.

    Args:
        archs: Architectures, by default those of `requested_archs`.
        output: The library, by default beside this package.

    Returns:
        Its path.

    Raises:
        RuntimeError: There is no nvcc, or it fails; the message has its own.
    """
    output = output or PACKAGE / LIBRARY_NAME
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError("nvcc was not found; set CUDA_HOME or put nvcc on PATH")
    output.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may build at once: each writes its own file, the last rename wins.
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=output.parent)
    os.close(handle)
    try:
        command = compile_command(nvcc, archs or requested_archs(), Path(temporary))
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"nvcc failed on the native KDA prefill kernel: {result.stderr.strip()[-2000:]}")
        os.chmod(temporary, 0o755)
        os.replace(temporary, output)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return output


def installed_library() -> Path | None:
    """The library that was built ahead of time, if any; it may lack code for the GPU at hand."""
    path = PACKAGE / LIBRARY_NAME
    return path if path.is_file() else None


def compiled_library(capability: tuple[int, int]) -> Path:
    """A library for a GPU of `capability` and these sources: from the cache folder, else compiled into it."""
    digest = hashlib.sha256()
    for path in sorted(source_dir().glob("*.cu*")):
        digest.update(path.read_bytes())
    root = Path(os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")).expanduser()
    arch = f"{capability[0]}.{capability[1]}a"
    cached = root / "kda_prefill" / f"{digest.hexdigest()[:16]}-{arch}" / LIBRARY_NAME
    return cached if cached.is_file() else build([arch], cached)
