# SPDX-License-Identifier: Apache-2.0
"""The lock files pin everything that the project needs, exactly, and name no place to get it from."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
LINE = re.compile(r'[\w.-]+==[\w.+!]+( ; python_version == "3\.\d+"( or python_version == "3\.\d+")*)?')


def lines(name: str) -> list[str]:
    text = (CHECKOUT / "requirements" / name).read_text()
    return [line for line in text.splitlines() if not line.startswith("#")]


def pins(*names: str) -> dict[str, str]:
    """Versions for this Python, by project."""
    found = [Requirement(line) for name in names for line in lines(name)]
    found = [pin for pin in found if pin.marker is None or pin.marker.evaluate()]
    versions = {str(canonicalize_name(pin.name)): str(pin.specifier).removeprefix("==") for pin in found}
    assert len(versions) == len(found), "a project is pinned twice"
    return versions


@pytest.mark.parametrize("name", ["runtime.txt", "dev.txt"])
def test_every_line_is_an_exact_pin(name: str) -> None:
    assert lines(name)
    assert [line for line in lines(name) if not LINE.fullmatch(line)] == []


def needed(requirements: list[str]) -> list[Requirement]:
    """The requirements and all that those need, as the installed packages' metadata says."""
    seen: dict[tuple[str, str], Requirement] = {}
    todo = [(Requirement(text), "") for text in requirements]
    while todo:
        requirement, extra = todo.pop()
        key = (str(requirement), extra)
        if key in seen or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
            continue
        seen[key] = requirement
        for text in importlib.metadata.requires(requirement.name) or []:
            todo += [(Requirement(text), extra) for extra in ("", *requirement.extras)]
    return list(seen.values())


@pytest.mark.parametrize(
    ("declared", "files"),
    [
        (PROJECT["dependencies"], ["runtime.txt"]),
        (PROJECT["optional-dependencies"]["dev"], ["runtime.txt", "dev.txt"]),
    ],
    ids=["runtime", "dev"],
)
def test_the_pins_are_complete_and_satisfy_every_requirement(declared: list[str], files: list[str]) -> None:
    versions = pins(*files)
    wrong = {}
    for requirement in needed(declared):
        version = versions.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong[str(requirement)] = version
    assert wrong == {}
