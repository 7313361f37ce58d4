# SPDX-License-Identifier: Apache-2.0
"""Output and draft tokens that are known in advance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor


class Scripted:
    """Tokens known in advance, so that a test decides how many drafts are accepted.

    Args:
        scripts: Request id -> all its tokens, prompt included.
        accepted: How many of the drafts from a position on are right, given request id and position.
    """

    def __init__(self, scripts: Mapping[str, Sequence[int]], accepted: Callable[[str, int], int]) -> None:
        self.scripts = scripts
        self.accepted = accepted

    def token(self, request_id: str, position: int, logits: Tensor) -> int:
        return self._at(request_id, position)

    def drafts(self, request_id: str, position: int, count: int) -> list[int]:
        right = self.accepted(request_id, position)
        tokens = [self._at(request_id, position + i) for i in range(count)]
        return [token if i < right else token ^ 1 for i, token in enumerate(tokens)]

    def _at(self, request_id: str, position: int) -> int:
        """A request whose last steps are in flight runs past its end: token 0."""
        script = self.scripts[request_id]
        return script[position] if position < len(script) else 0
