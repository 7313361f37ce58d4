# SPDX-License-Identifier: Apache-2.0
"""What a check found: one line, its colour, and a hint where something is to be done."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

LONGEST = 400
"""Characters of a message or hint; a variable's value may have any number."""

DOCS = "docs/operations.md lists every setting and error"


class Colour(StrEnum):
    """How much a finding matters: nothing to do, the server starts but not as meant, the server does not start."""

    GREEN = "green"
    YELLOW = "yellow"
    RED = "red"


def one_line(text: str) -> str:
    """`text` on one line, of characters that every terminal and file takes, and not too long."""
    line = " ".join(text.split())
    line = "".join(character if character.isprintable() else repr(character)[1:-1] for character in line)
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        check: Name of the check.
        colour: How much it matters.
        message: One line.
        hint: What to do; never empty for yellow and red.

    Raises:
        ValueError: A yellow or red finding has no hint.
    """

    check: str
    colour: Colour
    message: str
    hint: str = ""

    def __post_init__(self) -> None:
        if self.colour is not Colour.GREEN and not self.hint:
            raise ValueError(f"a {self.colour} finding says what to do: {self.message}")
        object.__setattr__(self, "message", one_line(self.message))
        object.__setattr__(self, "hint", one_line(self.hint))


def green(check: str, message: str) -> Finding:
    return Finding(check, Colour.GREEN, message)


def yellow(check: str, message: str, hint: str) -> Finding:
    return Finding(check, Colour.YELLOW, message, hint)


def red(check: str, message: str, hint: str) -> Finding:
    return Finding(check, Colour.RED, message, hint)


def from_server(check: str, line: str, colour: Colour = Colour.RED) -> Finding:
    """A finding of a line that a server would end with; what to do stands there behind `; ` or the last `: `."""
    message, found, hint = line.partition("; ")
    if not found:
        message, _, hint = line.rpartition(": ")
    return Finding(check, colour, message or line, hint if message else DOCS)


def exit_status(findings: Iterable[Finding]) -> int:
    """1 where a finding is red, else 0."""
    return int(any(finding.colour is Colour.RED for finding in findings))


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """The findings and the exit status, for `--json`."""
    return {"exit_status": exit_status(findings), "findings": [asdict(finding) for finding in findings]}
