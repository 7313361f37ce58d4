# SPDX-License-Identifier: Apache-2.0
"""What is sent: prompts, branches and conversations, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

FIRST_TOKEN, PAST_TOKENS = 10, 31_900
"""Token ids that every model of this family has, none of them special."""


def prompt(length: int, *seed: object) -> list[int]:
    """Random token ids, the same for the same length and seed; of two lengths, neither begins the other."""
    source = random.Random(repr((length, *seed)))
    return [source.randrange(FIRST_TOKEN, PAST_TOKENS) for _ in range(length)]


def branch(base: list[int], at: int, *seed: object) -> list[int]:
    """A prompt as long as `base` that leaves it at token `at`."""
    left = prompt(len(base) - at, "branch", at, *seed)
    if left and left[0] == base[at]:
        left[0] = FIRST_TOKEN if base[at] != FIRST_TOKEN else FIRST_TOKEN + 1
    return base[:at] + left


@dataclass(frozen=True)
class Turn:
    """One request of a conversation.

    Attributes:
        user: Whose conversation.
        kind: `first`, `extend`, or `branch` for a history rendered again from some point on.
        tokens: The prompt.
        kept: Leading tokens it has in common with the user's turn before.
    """

    user: int
    kind: str
    tokens: list[int]
    kept: int


@dataclass(frozen=True)
class Conversations:
    """Several users of one system prompt.

    A turn adds to its user's history the last answer and the next question; or, with a probability of `branching`,
    the history is rendered again and differs from a uniformly random point on (a tool result cut, a message edited, a
    retry): the rest keeps its length. A history past `longest` starts anew after the system prompt.

    Attributes:
        turns: Requests, of users drawn at random.
        users: Conversations at a time.
        system: Tokens of the shared system prompt.
        opening: Tokens of a first question, drawn from 1 to this (documents, files).
        added: Tokens a turn adds, drawn from 1 to this.
        longest: Tokens of the longest history.
        branching: Probability that a turn renders its history again.
        seed: Of everything drawn.
    """

    turns: int = 120
    users: int = 8
    system: int = 2048
    opening: int = 8192
    added: int = 2048
    longest: int = 24_576
    branching: float = 0.5
    seed: int = 1

    def __iter__(self) -> Iterator[Turn]:
        source = random.Random(repr(self))

        def words(most: int) -> list[int]:
            return [source.randrange(FIRST_TOKEN, PAST_TOKENS) for _ in range(source.randint(1, most))]

        system = prompt(self.system, "system", self.seed)
        history: dict[int, list[int]] = {}
        for _ in range(self.turns):
            user = source.randrange(self.users)
            said = history.get(user, [])
            if not said or len(said) > self.longest - self.added:
                kind, kept, tokens = "first", 0, system + words(self.opening)
            elif source.random() < self.branching:
                kept = source.randint(self.system, len(said) - 1)
                tail = len(said) - kept
                kind, tokens = "branch", said[:kept] + [source.randrange(FIRST_TOKEN, PAST_TOKENS) for _ in range(tail)]
            else:
                kind, kept, tokens = "extend", len(said), said + words(self.added)
            history[user] = tokens
            yield Turn(user, kind, tokens, kept)
