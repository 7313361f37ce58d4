# SPDX-License-Identifier: Apache-2.0
"""Where output tokens and draft tokens come from."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Sampler(Protocol):
    """Chooses tokens. Both answers may depend on nothing but the arguments, or a replay would differ."""

    def token(self, request_id: str, position: int, logits: Tensor) -> int:
        """The token at absolute `position` of a request, given its logits `[vocabulary]`."""
        ...

    def drafts(self, request_id: str, position: int, count: int) -> list[int]:
        """`count` guesses at the tokens from `position` on."""
        ...


class Greedy:
    """The most likely token; guesses are always token 0."""

    def token(self, request_id: str, position: int, logits: Tensor) -> int:
        return int(logits.argmax())

    def drafts(self, request_id: str, position: int, count: int) -> list[int]:
        return [0] * count
