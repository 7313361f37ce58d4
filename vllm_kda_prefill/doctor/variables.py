# SPDX-License-Identifier: Apache-2.0
"""The environment variables: values that no setting takes, and names that are nearly one of this fork's."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm.kda_prefill_variables import GATE, LOG_LIMIT, RETENTION, SPLIT_MAMBA, SPLIT_TARGET
from vllm_kda_prefill.doctor.findings import Finding, from_server, green, red, yellow

OURS = (GATE, RETENTION, LOG_LIMIT, SPLIT_TARGET, SPLIT_MAMBA)
PREFIXES = ("VLLM_B12X_KDA", "VLLM_GLM53", "VLLM_KDA")
"""What begins like this and is no variable of vLLM's is meant for this fork."""

PLUGIN = "kda_prefill_coalescing"
CHECK = "variables"


def gate_finding(value: str | None, problem: str, is_on: bool) -> Finding:
    """Whether the gate is on.

    Args:
        value: Of the variable; None where it is not set.
        problem: Why the value is none, or an empty string.
        is_on: What it says.
    """
    if problem:
        return from_server("gate", problem)
    if is_on:
        return green("gate", f"{GATE}={value!r} is on")
    found = "is not set" if value is None else f"is {value!r}"
    return yellow("gate", f"{GATE} {found}, so a server is stock", f"export {GATE}=1 in every process of the engine")


def value_findings(environ: Mapping[str, str], problems: Mapping[str, str]) -> list[Finding]:
    """One finding for each variable but the gate that is set.

    Args:
        environ: The environment.
        problems: Variable -> why a server refuses its value.
    """
    set_ones = [name for name in OURS[1:] if environ.get(name)]
    return [
        from_server(CHECK, problems[name]) if name in problems else green(CHECK, f"{name}={environ[name]!r}")
        for name in set_ones
    ]


def pair_finding(environ: Mapping[str, str], problem: str) -> list[Finding]:
    """What is wrong with the two block sizes beside each other, where each alone is right."""
    if not problem:
        return []
    if all(environ.get(name) for name in (SPLIT_TARGET, SPLIT_MAMBA)):
        return [from_server(CHECK, problem)]
    given = SPLIT_TARGET if environ.get(SPLIT_TARGET) else SPLIT_MAMBA
    return [red(CHECK, f"{given} is set alone", problem)]


def misspelt_findings(environ: Mapping[str, str], known: Collection[str]) -> list[Finding]:
    """One finding for each variable that looks meant for this fork and is not one of its own.

    Args:
        environ: The environment.
        known: vLLM's own variables, and this fork's.
    """
    findings = []
    for name in sorted(environ):
        near = difflib.get_close_matches(name.upper(), OURS, n=1, cutoff=0.85)
        if name in known or not (name.upper().startswith(PREFIXES) or near):
            continue
        (close,) = near or difflib.get_close_matches(name.upper(), OURS, n=1, cutoff=0.0)
        findings.append(
            yellow(CHECK, f"{name!r} is no variable of this fork, so nothing reads it", f"did you mean {close}?")
        )
    return findings


def plugin_finding(entry_points: Collection[str], allowed: str | None) -> Finding:
    """Whether vLLM will load the gate.

    Args:
        entry_points: Names of the installed plugins of the group `vllm.general_plugins`.
        allowed: The variable `VLLM_PLUGINS`; None where it is not set.
    """
    if PLUGIN not in entry_points:
        return red("plugin", f"the plugin {PLUGIN} is not installed beside vLLM", "pip install . in this checkout")
    if allowed is not None and PLUGIN not in allowed.split(","):
        return red(
            "plugin", f"VLLM_PLUGINS={allowed!r} leaves out {PLUGIN}", f"add {PLUGIN} to VLLM_PLUGINS, or unset it"
        )
    return green("plugin", f"vLLM loads {PLUGIN}")


def problem_of(name: str) -> str:
    """Why a server refuses the value of `name`, as its own line; an empty string where it takes it."""
    from vllm.plugins.kda_prefill_coalescing.settings import SETTINGS

    try:
        SETTINGS[name]()
    except ValueError as error:
        return str(error)
    return ""


def unreadable(environ: Mapping[str, str], readers: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """vLLM's own variables whose values it cannot read -> what it says; it would not name them.

    Args:
        environ: The environment.
        readers: `vllm.envs.environment_variables`.
    """
    problems = {}
    for name in sorted(readers.keys() & environ.keys() - {*OURS}):
        try:
            readers[name]()
        except Exception as error:  # Each reader is code of its own.
            problems[name] = f"{type(error).__name__}: {error}"
    return problems


def unreadable_findings(environ: Mapping[str, str], problems: Mapping[str, str]) -> list[Finding]:
    """One finding for each of vLLM's own variables that it cannot read."""
    return [
        red(CHECK, f"vLLM cannot read {name}={environ[name][:40]!r} ({problem})", f"unset {name}, or mend it")
        for name, problem in problems.items()
    ]


def pair_problem() -> str:
    """Why a server refuses the two block sizes together; an empty string where it takes them."""
    from vllm.plugins.kda_prefill_coalescing.block_layout import read_settings

    try:
        read_settings()
    except ValueError as error:
        return str(error)
    return ""


@contextmanager
def usable(problems: Collection[str], pair_is_wrong: bool) -> Iterator[None]:
    """The environment with values that can be used in place of those that cannot, so that a fault has one line.

    The gate is off inside: the checks ask what a server would ask, and are not asked themselves.

    Args:
        problems: Variables whose values cannot be used.
        pair_is_wrong: Whether the block sizes cannot stand beside each other.
    """
    before = dict(os.environ)
    os.environ[GATE] = "0"
    for name in {*problems} - {GATE, SPLIT_TARGET, SPLIT_MAMBA}:
        del os.environ[name]
    if pair_is_wrong or {*problems} & {SPLIT_TARGET, SPLIT_MAMBA}:
        os.environ[SPLIT_TARGET] = os.environ[SPLIT_MAMBA] = "auto"
    try:
        yield
    finally:
        for name in {*OURS, *problems}:
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
