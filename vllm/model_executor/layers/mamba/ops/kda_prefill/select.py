# SPDX-License-Identifier: Apache-2.0
"""Choice of the KDA prefill provider: one table, read top to bottom."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from .base import HEAD_DIM, KDAPrefill

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "native", "flashkda", "b12x", "triton", "reference")


def select_kda_prefill(
    backend: str,
    *,
    capability: tuple[int, int] | None,
    head_dim: int,
    dtype: torch.dtype,
    lower_bound: float | None,
    max_num_tokens: int,
    max_num_seqs: int,
    num_heads: int,
) -> KDAPrefill | None:
    """Build the provider `backend` names, or the best one for `auto`.

    Args:
        backend: One of `BACKENDS`.
        capability: The GPU's compute capability; None off CUDA.
        head_dim: Key and value size of a head.
        dtype: Of the activations.
        lower_bound: The gate's; None for an unbounded gate.
        max_num_tokens: Most tokens of one batch.
        max_num_seqs: Most rows of one batch.
        num_heads: Heads of this rank.

    Returns:
        The provider, or None where stock's Triton path runs, which exports no checkpoint (`triton`, or `auto`
        without a kernel).

    Raises:
        ValueError: An unknown name.
        RuntimeError: An explicit choice cannot run here; the message says why.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown KDA prefill backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    if backend == "triton":
        return None
    sizes = {"num_heads": num_heads, "max_num_tokens": max_num_tokens, "max_num_seqs": max_num_seqs}
    reason = ""
    for name in _allowed(backend, capability):
        reason = _unsupported(name, capability, head_dim, dtype, lower_bound)
        if not reason:
            try:
                return _BUILDERS[name](sizes)
            except (ImportError, RuntimeError, OSError) as error:
                reason = str(error)
                logger.warning("KDA prefill backend %r is passed over: %s", name, reason)
    if backend == "auto":
        return None
    raise RuntimeError(f"KDA prefill backend {backend!r} cannot run here: {reason}")


def unsupported(backend: str, *, capability: tuple[int, int] | None, head_dim: int, lower_bound: float | None) -> str:
    """Why no provider that `backend` allows takes such a bf16 layer on this device, or an empty string.

    `backend` is one of `BACKENDS` that exports states. Nothing is imported or built, so that a layer which is
    supported may still fail to be: a package is missing.
    """
    reasons = [*choices(backend, capability=capability, head_dim=head_dim, lower_bound=lower_bound).values()]
    return reasons[-1] if all(reasons) else ""


def choices(
    backend: str, *, capability: tuple[int, int] | None, head_dim: int, lower_bound: float | None
) -> dict[str, str]:
    """The providers that `backend` allows, in order of preference, and why each takes no such bf16 layer here.

    Arguments are those of `unsupported`; an empty string stands for a provider that takes it.
    """
    names = _allowed(backend, capability)
    return {name: _unsupported(name, capability, head_dim, torch.bfloat16, lower_bound) for name in names}


def _allowed(backend: str, capability: tuple[int, int] | None) -> tuple[str, ...]:
    """Order of preference. The native kernel was measured on SM90 only; it has to be asked for elsewhere."""
    if backend != "auto":
        return (backend,)
    return ("native", "flashkda") if capability == (9, 0) else ("flashkda",)


def _unsupported(
    name: str,
    capability: tuple[int, int] | None,
    head_dim: int,
    dtype: torch.dtype,
    lower_bound: float | None,
) -> str:
    """Why `name` cannot run, or an empty string."""
    if head_dim != HEAD_DIM:
        return f"head size is {head_dim}, the kernels have {HEAD_DIM}"
    if dtype != torch.bfloat16:
        return f"activations are {dtype}, the kernels take bfloat16"
    if lower_bound is None or not -5.0 <= lower_bound < 0.0:
        return f"the gate's lower bound is {lower_bound}, the kernels need one in [-5, 0)"
    wanted, supported = _CAPABILITIES[name]
    if not supported(capability):
        return f"it needs {wanted}, this device is {_describe(capability)}"
    return ""


def _describe(capability: tuple[int, int] | None) -> str:
    return "not a CUDA GPU" if capability is None else f"SM{capability[0]}{capability[1]}"


_CAPABILITIES: dict[str, tuple[str, Callable[[tuple[int, int] | None], bool]]] = {
    "native": ("SM90, SM120 or SM121", lambda c: c in ((9, 0), (12, 0), (12, 1))),
    "flashkda": ("SM90, SM10x or SM12x", lambda c: c is not None and c[0] in (9, 10, 12)),
    "b12x": ("SM120 or SM121", lambda c: c in ((12, 0), (12, 1))),
    "reference": ("any device", lambda c: True),
}


def _build_native(sizes: dict[str, int]) -> KDAPrefill:
    from .native import NativeKDAPrefill

    return NativeKDAPrefill(**sizes)


def _build_flashkda(sizes: dict[str, int]) -> KDAPrefill:
    from .flashkda import FlashKDALauncher
    from .segmented import SegmentedKDAPrefill

    return SegmentedKDAPrefill(FlashKDALauncher(**sizes), **sizes)


def _build_b12x(sizes: dict[str, int]) -> KDAPrefill:
    from .b12x import B12xLauncher
    from .segmented import SegmentedKDAPrefill

    return SegmentedKDAPrefill(B12xLauncher(**sizes, device="cuda"), **sizes)


def _build_reference(sizes: dict[str, int]) -> KDAPrefill:
    from .reference import ReferenceKDAPrefill

    return ReferenceKDAPrefill()


_BUILDERS: dict[str, Callable[[dict[str, int]], KDAPrefill]] = {
    "native": _build_native,
    "flashkda": _build_flashkda,
    "b12x": _build_b12x,
    "reference": _build_reference,
}
