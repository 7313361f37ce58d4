# SPDX-License-Identifier: Apache-2.0
"""Whether the installed vLLM is the one that the patches were written against."""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import vllm
from vllm.kda_prefill_variables import GATE, SPLIT_MAMBA, SPLIT_TARGET

VLLM_VERSION = "0.33.0"
VARIABLES = f"{GATE}, {SPLIT_TARGET} and {SPLIT_MAMBA}"
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def _module_source(module: str) -> tuple[list[str], ast.Module]:
    """Lines and syntax tree of an installed vLLM module, without importing it: plugins load before most do."""
    path = Path(vllm.__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    text = path.read_text(encoding="utf-8")
    return text.splitlines(keepends=True), ast.parse(text)


def source_digest(target: str) -> str:
    """First 16 digits of the SHA-256 of an upstream source; `missing` where there is none.

    Args:
        target: `module:qualified name`, or the path of a whole file that is no module, from the folder of `vllm` on.
    """
    module, _, qualified_name = target.partition(":")
    if not qualified_name:
        path = Path(vllm.__file__).parents[1] / target
        return _digest(path.read_bytes()) if path.is_file() else "missing"
    try:
        lines, node = _module_source(module)
    except OSError:
        return "missing"
    scope: ast.AST = node
    for part in qualified_name.split("."):
        found = [n for n in ast.iter_child_nodes(scope) if isinstance(n, DEFINITIONS) and n.name == part]
        if not found:
            return "missing"
        scope = found[0]
    assert isinstance(scope, DEFINITIONS)
    assert scope.end_lineno is not None
    first = min([scope.lineno, *(decorator.lineno for decorator in scope.decorator_list)])
    return _digest("".join(lines[first - 1 : scope.end_lineno]).encode())


def _digest(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:16]


def changed_sources(digests: Iterable[tuple[str, str]]) -> list[str]:
    """The upstream sources that differ from what the patches were written against.

    Args:
        digests: Each source as `source_digest` takes it, and the digest that it gave then.
    """
    return list(dict.fromkeys(target for target, digest in digests if source_digest(target) != digest))


def check_upstream(digests: Iterable[tuple[str, str]]) -> None:
    """Refuse a vLLM that the patches were not written against.

    Args:
        digests: As in `changed_sources`.

    Raises:
        RuntimeError: Another version, or a changed source behind a patch.
    """
    installed = version("vllm").partition("+")[0]
    if installed != VLLM_VERSION:
        raise RuntimeError(
            f"this fork needs vLLM {VLLM_VERSION}, found {installed}: install vllm=={VLLM_VERSION}, "
            f"or unset {VARIABLES}"
        )
    changed = changed_sources(digests)
    if changed:
        raise RuntimeError(
            f"this vLLM {installed} is not the one this fork was written against; changed: {', '.join(changed)}. "
            f"Install the stock wheel of vllm=={VLLM_VERSION}, or unset {VARIABLES}"
        )
