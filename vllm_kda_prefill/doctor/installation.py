# SPDX-License-Identifier: Apache-2.0
"""What is installed: vLLM's version and sources, and the CUDA of torch."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_kda_prefill.doctor.findings import Finding, green, red

SHOWN = 3
"""Changed sources that a line names."""


def version_finding(installed: str | None, wanted: str) -> Finding:
    """Whether vLLM is the one that this fork was written for.

    Args:
        installed: Its version; None where there is none.
        wanted: The version it has to be.
    """
    if installed is None:
        return red("vllm", "vLLM is not installed", f"pip install vllm=={wanted}")
    if installed.partition("+")[0] != wanted:
        return red("vllm", f"vLLM is {installed}, this fork needs {wanted}", f"pip install vllm=={wanted}")
    return green("vllm", f"vLLM {installed}")


def source_finding(changed: Sequence[str], total: int, wanted: str) -> Finding:
    """Whether the sources behind the patches are as they were when the patches were written.

    Args:
        changed: Those that are not.
        total: How many there are.
        wanted: vLLM's version.
    """
    if not changed:
        return green("sources", f"all {total} sources that the patches rely on are unchanged")
    more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    return red(
        "sources",
        f"{len(changed)} of {total} sources that the patches rely on differ: {', '.join(changed[:SHOWN])}{more}",
        f"install the stock wheel again: pip install --force-reinstall --no-deps vllm=={wanted}",
    )


def torch_finding(version: str, cuda: str | None) -> Finding:
    """Whether torch can use a GPU at all.

    Args:
        version: Of torch.
        cuda: The CUDA version it was built with; None for a build without.
    """
    if cuda is None:
        return red("torch", f"torch {version} was built without CUDA", "install what requirements/runtime.txt names")
    return green("torch", f"torch {version}, CUDA {cuda}")
