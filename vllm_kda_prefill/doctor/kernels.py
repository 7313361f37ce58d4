# SPDX-License-Identifier: Apache-2.0
"""Which kernel will export states, and why."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from vllm_kda_prefill.doctor.findings import Finding, green, red, yellow

CHECK = "kernel"
WITHOUT_BACKEND = 'leave "kda_prefill_backend" out of --additional-config, or give it what it lacks'
READY = "built ahead of time", "compiled on its first use"
"""How `versions.kernel_state` begins where the native kernel can be had."""


def missing_parts(native_state: str) -> dict[str, str]:
    """Provider -> what it lacks on this host, an empty string for nothing.

    Args:
        native_state: What `versions.kernel_state` says.
    """
    return {
        "native": "" if native_state.startswith(READY) else native_state,
        "flashkda": "" if find_spec("vllm._flashkda_C") else "this vLLM has no extension _flashkda_C",
        "b12x": "" if find_spec("b12x") else 'the package b12x is not installed: pip install ".[b12x]"',
    }


def kernel_finding(backend: str, choices: Mapping[str, str], missing: Mapping[str, str], native_state: str) -> Finding:
    """The provider that a server will take.

    Args:
        backend: What `--additional-config` asks for, `auto` by default.
        choices: Provider -> why it takes no layer of this model on this GPU; in order of preference.
        missing: Provider -> what it lacks on this host.
        native_state: How the native kernel gets to the GPU.
    """
    reasons = {name: reason or missing.get(name, "") for name, reason in choices.items()}
    chosen = next((name for name, reason in reasons.items() if not reason), None)
    passed_over = [f"{name} is passed over ({reason})" for name, reason in reasons.items() if reason]
    if chosen is None:
        asked = f"{backend} exports no states here: {'; '.join(passed_over)}"
        return red(CHECK, asked, "install the stock wheel of vLLM" if backend == "auto" else WITHOUT_BACKEND)
    why = "first choice of auto on this GPU" if backend == "auto" else "asked for"
    if chosen == "native":
        why += f"; {native_state}"
    if passed_over and next(iter(reasons)) != chosen:
        return yellow(CHECK, f"{chosen} exports states; {'; '.join(passed_over)}", "give the first one what it lacks")
    return green(CHECK, f"{chosen} exports states ({why})")
