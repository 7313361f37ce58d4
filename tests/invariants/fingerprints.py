# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of token prefixes: one integer names exactly which tokens a block's content stands for."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

MODULUS = (1 << 61) - 1
FACTOR = 1_000_003
EMPTY = 1
"""Fingerprint of the empty prefix. 0 stands for content that nobody wrote."""

Fingerprints = npt.NDArray[np.int64]


def extend(fingerprint: int, tokens: Iterable[int]) -> Fingerprints:
    """Fingerprints int64 `[T]` of a prefix after each of `tokens` that follow it.

    The chain starts from what a block holds, so whatever is computed from a wrong block has a wrong fingerprint
    too.
    """
    chain = []
    for token in tokens:
        fingerprint = (fingerprint * FACTOR + token + 7) % MODULUS
        chain.append(fingerprint)
    return np.array(chain, np.int64)


def spoiled(fingerprint: int, other: int) -> int:
    """A fingerprint that names no prefix, for content made from two prefixes."""
    return (fingerprint * 31 + other * 17 + 5) % MODULUS
