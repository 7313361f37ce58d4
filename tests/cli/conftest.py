# SPDX-License-Identifier: Apache-2.0
"""Runs the command in a process of its own, or in this one."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from vllm_kda_prefill.cli import main


@dataclass
class Done:
    """How a command ended: its exit status, and what it printed."""

    status: int
    out: str
    err: str


def run_alone(*arguments: str) -> Done:
    """Run a command in a Python of its own, as a user does."""
    done = subprocess.run(
        [sys.executable, "-m", "vllm_kda_prefill", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"},
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command in this process, which imports vLLM once for all tests."""

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["kda-prefill", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        printed = capsys.readouterr()
        return Done(int(stop.value.code or 0), printed.out, printed.err)

    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    yield call
    logging.disable(logging.NOTSET)
