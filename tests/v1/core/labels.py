# SPDX-License-Identifier: Apache-2.0
"""Labels that stand for contents: of a state, or of a token's KV, a hash of all tokens before it."""

from __future__ import annotations

from dataclasses import dataclass, field

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
