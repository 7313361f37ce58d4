# SPDX-License-Identifier: Apache-2.0
"""What the worker remembers of a request between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_kda_prefill.toymodel.fingerprints import EMPTY, Fingerprints, extend


@dataclass
class WorkerRequest:
    """One request's tokens, pages and recurrent position.

    Attributes:
        request_id: vLLM's id.
        tokens: Known tokens, prompt and outputs.
        prefill_len: Tokens known when the request was (re)scheduled; below it a step samples nothing.
        computed: Tokens computed, rejected drafts taken back.
        announced: The scheduler's own count, which runs ahead under asynchronous scheduling.
        tables: Page ids of each KV cache group. They only ever grow.
        state_column: Column of the Mamba tables with the running state; -1 before the first token.
        accepted: Which of the columns from there on holds the true state, counted from 1: the one after
            `accepted` tokens of the last query.
        drafts: Guesses at the tokens after the known ones.
        prefixes: Fingerprint of each known prefix, `prefixes[n]` of the first `n` tokens.
    """

    request_id: str
    tokens: list[int]
    computed: int
    announced: int
    tables: list[list[int]]
    state_column: int
    prefill_len: int = 0
    accepted: int = 1
    drafts: list[int] = field(default_factory=list)
    prefixes: Fingerprints = field(default_factory=lambda: np.array([EMPTY], np.int64))

    def __post_init__(self) -> None:
        self.prefill_len = len(self.tokens)
        self._fingerprint()

    def append_tokens(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self._fingerprint()

    def _fingerprint(self) -> None:
        known = len(self.prefixes) - 1
        chain = extend(int(self.prefixes[-1]), self.tokens[known:])
        self.prefixes = np.concatenate([self.prefixes, chain])

    def append_pages(self, pages: Sequence[Sequence[int]]) -> None:
        for table, new in zip(self.tables, pages, strict=True):
            table.extend(new)

    def inputs(self, count: int) -> list[int]:
        """The next `count` tokens to compute: known ones, then drafts (token 0 where there is none yet)."""
        ahead = self.tokens[self.computed :] + self.drafts
        return (ahead + [0] * count)[:count]
