# SPDX-License-Identifier: Apache-2.0
"""Files of recorded prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes lines to a file of a new folder."""

    def call(*lines: str, name: str = "trace.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    return call
