# SPDX-License-Identifier: Apache-2.0
"""Write runtime.txt and dev.txt: exact versions for every Python this project supports.

    python requirements/lock.py python3.11 python3.12 python3.13

Each interpreter's pip resolves the dependencies of pyproject.toml without installing them. The oldest Python
goes first and the others keep its versions, so a pin needs an environment marker only where a package is not
needed on every Python. A conflict ends the run; a line in CAPS settles it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
# vLLM caps it on Python 3.12 and later only.
CAPS = ["setuptools<81"]

Pins = dict[str, str]  # project name -> version


def resolve(python: str, requirements: list[str], constraints: list[str]) -> Pins:
    """Versions that pip would install on `python`."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.json")
        limits = Path(scratch, "constraints.txt")
        limits.write_text("\n".join(constraints))
        command = [python, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*command, "-c", limits, "--report", report, *requirements], check=True)
        found = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    return {entry["name"].lower().replace("_", "-"): entry["version"] for entry in found}


def lock_text(title: str, by_python: dict[str, Pins]) -> str:
    """The lock file: one line a pin, with a marker where not every Python has it."""
    pythons_of: dict[str, list[str]] = {}
    for python, pins in by_python.items():
        for name, version in pins.items():
            pythons_of.setdefault(f"{name}=={version}", []).append(python)
    lines = [f"# {title}: Linux x86_64, Python {', '.join(by_python)}. Written by requirements/lock.py."]
    for pin, pythons in sorted(pythons_of.items()):
        marker = " or ".join(f'python_version == "{python}"' for python in pythons)
        lines.append(pin if len(pythons) == len(by_python) else f"{pin} ; {marker}")
    return "\n".join([*lines, ""])


def main(interpreters: list[str]) -> None:
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    dependencies, tools = project["dependencies"], project["optional-dependencies"]["dev"]
    runtime: dict[str, Pins] = {}
    dev: dict[str, Pins] = {}
    limits = CAPS
    for python in interpreters:
        show_version = "import sys; print('%d.%d' % sys.version_info[:2])"
        version = subprocess.check_output([python, "-c", show_version], text=True).strip()
        print(f"resolving for Python {version}", file=sys.stderr)
        runtime[version] = resolve(python, dependencies, limits)
        limits = [*limits, *(f"{name}=={pin}" for name, pin in runtime[version].items())]
        everything = resolve(python, dependencies + tools, limits)
        dev[version] = {name: pin for name, pin in everything.items() if name not in runtime[version]}
        limits = [*limits, *(f"{name}=={pin}" for name, pin in dev[version].items())]
    (HERE / "runtime.txt").write_text(lock_text("vLLM and what the fork needs beside it", runtime))
    (HERE / "dev.txt").write_text(lock_text("Tools for tests and checks", dev))


if __name__ == "__main__":
    main(sys.argv[1:])
