# SPDX-License-Identifier: Apache-2.0
"""Recorded prompts, and which of their prefixes are equal.

A trace has no text: it has one id a block of tokens, equal where the blocks are. A `PrefixTree` turns the ids of a
prompt into nodes, one a block, so that two prompts share a node exactly where all their blocks up to it are equal.
Everything else (block hashes for vLLM, the two bounds) reads nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

Position = tuple[int, int]
"""What names a prefix: the node of the last block that it touches, and its tokens."""


class PrefixTree:
    """Numbers prefixes: equal prefixes get equal numbers."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], int] = {}
        self._count = 0

    def fresh(self) -> int:
        """A node that nothing else shares: a root for ids that mean nothing in other files, or a block of its own."""
        self._count += 1
        return self._count

    def walk(self, root: int, ids: Iterable[int]) -> tuple[int, ...]:
        """The node after each of `ids`, from `root` on."""
        node, path = root, []
        for block in ids:
            child = self._children.get((node, block))
            if child is None:
                child = self._children[node, block] = self.fresh()
            path.append(child)
            node = child
        return tuple(path)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One recorded request.

    Attributes:
        time: Seconds after the trace's begin.
        tokens: Tokens of the prompt.
        output_tokens: Tokens that were answered; kept for the record, a replay answers one.
        block_size: Tokens of a recorded block.
        path: Node of every block, the last of which may be shorter.
    """

    time: float
    tokens: int
    output_tokens: int
    block_size: int
    path: tuple[int, ...]

    def cut(self, longest: int) -> Prompt:
        """The prompt, or its first `longest` tokens if it has more."""
        if self.tokens <= longest:
            return self
        return replace(self, tokens=longest, path=self.path[: -(-longest // self.block_size)])

    def position(self, tokens: int, lookahead: int = 0) -> Position:
        """The name of the prompt's first `tokens` tokens.

        Ids say whether blocks are equal, not where they begin to differ: blocks with different ids are taken to differ
        in their first token. So the name of a prefix that ends inside a block depends on that block's id, and with
        hashes that look ahead, the name of one that ends with a block depends on the next block's.

        Args:
            tokens: Length of the prefix.
            lookahead: Tokens after it that the name covers; the prompt has them.
        """
        assert 0 < tokens <= self.tokens - lookahead, f"{tokens} + {lookahead} of {self.tokens} tokens"
        return self.path[(tokens + lookahead - 1) // self.block_size], tokens

    def positions(self, unit: int, lookahead: int = 0) -> list[Position]:
        """The names of the prompt's prefixes of 1, 2, ... times `unit` tokens that have names: as many as there are
        with `lookahead` tokens after them."""
        count = max(self.tokens - lookahead, 0) // unit
        return [self.position((index + 1) * unit, lookahead) for index in range(count)]


@dataclass(frozen=True)
class Trace:
    """Recorded prompts in the order of their times.

    Attributes:
        name: What tables call it.
        prompts: At least one.
    """

    name: str
    prompts: Sequence[Prompt]

    @property
    def tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(prompt.tokens for prompt in self.prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(prompt.tokens for prompt in self.prompts)

    def first(self, count: int | None, longest: int) -> Trace:
        """The first `count` prompts (None: all), each cut at `longest` tokens."""
        return replace(self, prompts=[prompt.cut(longest) for prompt in self.prompts[:count]])
