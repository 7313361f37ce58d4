# SPDX-License-Identifier: Apache-2.0
"""What pyproject.toml cannot say: the overlay's packages, the CUDA sources and the editable install.

`vllm/` here is an overlay. A wheel puts its files beside stock vLLM's in site-packages, where folders that
stock vLLM has are already packages. In an editable install they stay in the checkout, and a finder that a
`.pth` file starts imports them from there (see `kda_prefill_finder`).
"""

from __future__ import annotations

import base64
import hashlib
import runpy
import shutil
import zipfile
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, find_namespace_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
KERNEL_SOURCES = "csrc/kda_prefill"
# First use of the native kernel compiles it, so an installed wheel carries the sources beside its launcher.
KERNEL_SOURCES_PACKAGE = "vllm.model_executor.layers.mamba.ops.kda_prefill.csrc"


KERNEL_PACKAGE = Path(*KERNEL_SOURCES_PACKAGE.split(".")).parent
KERNEL_BUILD = runpy.run_path(str(ROOT / KERNEL_PACKAGE / "build.py"))


class BuildPy(build_py):
    """Starts from an empty folder, where a module that was removed since the last build cannot get in, and
    compiles the native kernel ahead of time where there is a CUDA compiler."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        if has_compiler():
            library = Path(self.build_lib) / KERNEL_PACKAGE / KERNEL_BUILD["LIBRARY_NAME"]
            try:
                KERNEL_BUILD["build"](None, library)
            except (RuntimeError, ValueError) as error:
                # The wheel works without it: the first use compiles, and says why if it cannot.
                self.warn(f"the native KDA prefill kernel is not in this wheel: {error}")


def has_compiler() -> bool:
    """Whether a wheel built here carries the native kernel, and so fits this kind of machine only."""
    return KERNEL_BUILD["find_nvcc"]() is not None


class KernelDistribution(Distribution):
    """Tags a wheel that carries the kernel with its platform."""

    def has_ext_modules(self) -> bool:
        return has_compiler()


class EditableWheel(Command):
    """Builds the wheel of `pip install -e .`: a `.pth` file and the metadata, no code.

    setuptools' own editable wheel would offer the checkout's `vllm` as a whole package and so shadow stock
    vLLM; it has no place for a start-up line.
    """

    description = "build the wheel of an editable install"
    user_options: ClassVar = [
        ("dist-dir=", "d", "directory to put the wheel in"),
        ("dist-info-dir=", "I", "directory of a prepared .dist-info"),
    ]

    def initialize_options(self) -> None:
        self.dist_dir: str | None = None
        self.dist_info_dir: str | None = None

    def finalize_options(self) -> None:
        self.dist_dir = self.dist_dir or str(ROOT / "dist")

    def run(self) -> None:
        dist_info = Path(self.dist_info_dir) if self.dist_info_dir else self._prepare_metadata()
        files = {
            f"{dist_info.name}/{path.relative_to(dist_info).as_posix()}": path.read_bytes()
            for path in sorted(dist_info.rglob("*"))
            if path.is_file() and path.name not in ("RECORD", "WHEEL")
        }
        tag = "py3-none-any"
        files[f"{dist_info.name}/WHEEL"] = (
            f"Wheel-Version: 1.0\nGenerator: setup.py\nRoot-Is-Purelib: true\nTag: {tag}\n".encode()
        )
        pth_name, pth_text = runpy.run_path(str(ROOT / "kda_prefill_finder" / "link.py"))["pth_file"](ROOT)
        files[pth_name] = pth_text.encode()
        record = f"{dist_info.name}/RECORD"
        rows = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
        files[record] = "\n".join([*rows, f"{record},,", ""]).encode()

        assert self.dist_dir is not None
        wheel = Path(self.dist_dir, f"{dist_info.name.removesuffix('.dist-info')}-0.editable-{tag}.whl")
        wheel.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in files.items():
                archive.writestr(name, data)

    def _prepare_metadata(self) -> Path:
        command = self.reinitialize_command("dist_info")
        assert self.dist_dir is not None
        command.output_dir = self.dist_dir
        command.ensure_finalized()
        command.run()
        return Path(command.dist_info_dir)


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


packages = find_namespace_packages(
    str(ROOT),
    include=["vllm", "vllm.*", "vllm_kda_prefill", "vllm_kda_prefill.*"],
    exclude=["*.__pycache__"],
)
package_dir = {}
if (ROOT / KERNEL_SOURCES).is_dir():
    packages.append(KERNEL_SOURCES_PACKAGE)
    package_dir[KERNEL_SOURCES_PACKAGE] = KERNEL_SOURCES

setup(
    packages=packages,
    package_dir=package_dir,
    package_data={
        "": ["py.typed", "*.json", "*.j2"],
        KERNEL_SOURCES_PACKAGE: ["**/*.cu", "**/*.cuh", "**/*.h", "**/*.cpp"],
    },
    include_package_data=False,
    distclass=KernelDistribution,
    cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel},
)
