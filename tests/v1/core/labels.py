# SPDX-License-Identifier: Apache-2.0
"""Labels that stand for contents: of a state, or of a token's KV, a hash of all tokens before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

Labels = list[int]


def output_token(seed: int, position: int) -> int:
    """The token that greedy decoding of a request would put at a position, whatever happened before."""
    return hash((seed, position)) % 50_000 + 1000


@dataclass
class Row:
    """What the worker knows of a request: its block table, and how many of its tokens are computed."""

    table: list[list[int]]
    computed: int
    seed: int
    tokens: list[int]
    labels: Labels = field(default_factory=lambda: [0])
    ran_drafts: bool = False

    def label(self, num_tokens: int) -> int:
        """Label of the state after `num_tokens` tokens."""
        while len(self.tokens) < num_tokens:
            self.tokens.append(output_token(self.seed, len(self.tokens)))
        while len(self.labels) <= num_tokens:
            self.labels.append(hash((self.labels[-1], self.tokens[len(self.labels) - 1])))
        return self.labels[num_tokens]


@dataclass
class Answer:
    """A step's result on its way back to the scheduler."""

    output: SchedulerOutput
    sampled: dict[str, list[int]]


class Fault(AssertionError):
    """The scheduler asked for something that corrupts a state or the prefix cache."""


def entries(pool: Any) -> Iterator[tuple[Any, Any]]:
    """All (key, block) pairs of a prefix cache."""
    for key, blocks in pool.cached_block_hash_to_block._cache.items():
        for block in blocks.values() if isinstance(blocks, dict) else (blocks,):
            yield key, block
