# SPDX-License-Identifier: Apache-2.0
"""Rules that every file keeps: a licence line, 300 lines, short names of tests, one word a thing, imports downwards."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SOURCES = ("benchmarks", "csrc", "kda_prefill_finder", "requirements", "tests", "vllm", "vllm_kda_prefill")
LICENCE = "SPDX-License-Identifier: Apache-2.0"

WORDS = {
    r"pages?": "block",
    r"slots?": "block, or state index for a row of the state pool",
    r"seams?": "patch",
    r"rungs?": "checkpoint position",
    r"lanes?": "server",
    r"stand[-_ ]ins?": "stub",
    r"true[-_ ]model": "toy model",
    r"ways?[-_ ]out": "hint",
    r"(first|second)[-_ ]class": "protected or probationary",
}
UPSTREAM = re.compile(
    r"(?<!\w)(\w*page_size_(bytes|padded)|get_paged_mqa_page_sizes|max_state_slots|slot_mappings?|allocate_slots|"
    r"slots=True|HTML page|the page cache|--pages?)(?!\w)"
)
"""Names of vLLM, b12x, Python and Linux, a page to read, and flags that keep their names."""

BELOW = {
    "vllm.v1.core": ("vllm.plugins", "vllm.v1.worker", "vllm.v1.attention", "vllm.models"),
    "vllm.v1.attention": ("vllm.plugins", "vllm.v1.worker", "vllm.models"),
    "vllm.v1.worker": ("vllm.models",),
}
"""A part of the fork, and what of the fork lies above it."""


def files(*suffixes: str, folders: tuple[str, ...] = SOURCES) -> list[Path]:
    found = (path for folder in folders for path in (CHECKOUT / folder).rglob("*") if path.suffix in suffixes)
    return sorted(path for path in found if "__pycache__" not in path.parts)


def lines(*folders: str) -> Iterator[tuple[str, str]]:
    """Every line of the Python files of `folders`, and its place."""
    for path in files(".py", folders=folders):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield f"{path.relative_to(CHECKOUT)}:{number}", line


def imports(path: Path) -> set[str]:
    """Modules, and names of modules, that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def own_modules(part: str) -> set[str]:
    """The fork's modules in a part of vLLM."""
    found = files(".py", folders=(part.replace(".", "/"),))
    return {".".join(path.relative_to(CHECKOUT).with_suffix("").parts).removesuffix(".__init__") for path in found}


def test_every_source_begins_with_its_licence() -> None:
    sources = files(".py", ".cu", ".cuh", ".cpp", ".sh")
    # A script's first line names its shell.
    heads = {
        path: [line for line in path.read_text().splitlines() if not line.startswith("#!")][:1] for path in sources
    }
    assert [path for path, head in heads.items() if LICENCE not in "".join(head)] == []


def test_files_have_at_most_300_lines() -> None:
    lengths = {
        str(path.relative_to(CHECKOUT)): len(path.read_text().splitlines())
        for path in files(".py", folders=("benchmarks", "tests", "vllm", "vllm_kda_prefill"))
    }
    assert {path: length for path, length in lengths.items() if length > 300} == {}


def test_names_of_tests_are_at_most_60_characters() -> None:
    names = (match[1] for _, line in lines("tests") if (match := re.search(r"def (test_\w+)", line)))
    assert [name for name in names if len(name) > 60] == []


@pytest.mark.parametrize("old", WORDS)
def test_no_old_word_comes_back(old: str) -> None:
    word = re.compile(rf"(?<![a-z])({old})(?![a-z])", re.IGNORECASE)
    found = [place for place, line in lines("vllm", "vllm_kda_prefill") if word.search(UPSTREAM.sub("", line))]
    assert found == [], f"write {WORDS[old]}"


@pytest.mark.parametrize("part", BELOW)
def test_no_part_imports_what_lies_above_it(part: str) -> None:
    above = set().union(*(own_modules(other) for other in BELOW[part]))
    upwards = {
        f"{path.relative_to(CHECKOUT)} imports {name}"
        for path in files(".py", folders=(part.replace(".", "/"),))
        for name in imports(path)
        if any(name == module or name.startswith(f"{module}.") for module in above)
    }
    assert upwards == set()
