# SPDX-License-Identifier: Apache-2.0
"""When the requests of a replay come: one after another, some at once, or at their recorded times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_kda_prefill.trace.prompts import Prompt


class Arrivals(Protocol):
    """Says how many of a trace's requests, which come in their order, have come."""

    def come(self, sent: int, running: int) -> int:
        """How many requests have come by now.

        Args:
            sent: Requests that have come before.
            running: Of these, requests that are not finished; with none, at least one more comes.
        """

    def note_step(self, tokens: int) -> None:
        """A step of so many tokens has run."""


@dataclass
class AtOnce:
    """Always `count` requests at a time: one comes when one finishes. One at a time is a `count` of 1."""

    count: int = 1

    def come(self, sent: int, running: int) -> int:
        return sent + max(self.count - running, 0)

    def note_step(self, tokens: int) -> None:
        """Time is of no matter."""


class Recorded:
    """Recorded times on a clock of steps, each as long as its tokens take; an idle server's clock goes on to the next
    request."""

    def __init__(self, prompts: Sequence[Prompt], speed: float, tokens_per_second: float) -> None:
        """
        Args:
            prompts: By time.
            speed: How many times as fast as recorded the requests come.
            tokens_per_second: What the server prefills.
        """
        self._times = [prompt.time / speed for prompt in prompts]
        self._tokens_per_second = tokens_per_second
        self.seconds = 0.0

    def come(self, sent: int, running: int) -> int:
        if not running and sent < len(self._times):
            self.seconds = max(self.seconds, self._times[sent])
        while sent < len(self._times) and self._times[sent] <= self.seconds:
            sent += 1
        return sent

    def note_step(self, tokens: int) -> None:
        self.seconds += tokens / self._tokens_per_second
