# SPDX-License-Identifier: Apache-2.0
"""Raw samples as lines of JSON: first what was run on what, then every sample."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from vllm_kda_prefill.bench.errors import BenchError

PACKAGES = ("vllm", "torch", "triton", "httpx", "numpy")
Record = dict[str, Any]


def environment() -> Record:
    """Versions, commit and machine that a run is on."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "commit": commit(),
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
        "gpu": gpu(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """The checkout's commit, marked where files differ from it; KDA_PREFILL_COMMIT where there is no repository."""
    given = os.environ.get("KDA_PREFILL_COMMIT")
    if given:
        return given
    root = Path(__file__).resolve().parents[2]
    found = _output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    if not found:
        return ""
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return found + ("+changes" if changed else "")


def gpu() -> str:
    """Name, memory and driver of the first GPU; empty without one."""
    query = "--query-gpu=name,memory.total,driver_version,clocks.max.sm"
    return _output("nvidia-smi", query, "--format=csv,noheader").partition("\n")[0]


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


class Recorder:
    """Appends records to one file; each line is complete when the next begins, also in a run that is cut."""

    def __init__(self, path: Path, configuration: Mapping[str, Any]) -> None:
        """Start a file.

        Raises:
            BenchError: It cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("w")
        except OSError as error:
            raise BenchError(f"--output {path}: {error.strerror}; name a file in a folder you can write to") from None
        self.path = path
        self.samples = 0
        command = [Path(sys.argv[0]).name, *sys.argv[1:]]
        self.add("run", command=command, configuration=dict(configuration), **environment())

    def add(self, kind: str, **values: Any) -> None:
        self.samples += kind == "sample"
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.add("failure", error=str(error) or type(error).__name__)
        self.close()


def read(path: Path) -> Iterator[Record]:
    """Every record of a file; a last line that was cut is left out.

    Raises:
        BenchError: Another line is no record.
    """
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and "kind" in record:
            yield record
        elif number < len(lines):
            raise BenchError(f"{path}: line {number} is no record of a measurement; remove the file from the folder")
