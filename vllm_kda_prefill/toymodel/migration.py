# SPDX-License-Identifier: Apache-2.0
"""How running states move between blocks.

A Mamba table's column `c` stands for the state after `(c + 1)` blocks of tokens. A query runs in the column of
its last token, so its state is copied there first. When accepted drafts carry a request to or past a block boundary,
the state at the boundary is saved in the boundary's own column afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_kda_prefill.toymodel.blocks import Memory
from vllm_kda_prefill.toymodel.requests import WorkerRequest


class Migration:
    """Moves states of all Mamba groups.

    Attributes:
        memories: What is moved: the KV cache, and whatever else follows it.
        groups: Mamba KV cache groups.
        block_tokens: Tokens of a Mamba block.
    """

    def __init__(self, memories: Sequence[Memory], groups: Iterable[int], block_tokens: int) -> None:
        self.memories = memories
        self.groups = tuple(groups)
        self.block_tokens = block_tokens

    def before(self, request: WorkerRequest, num_tokens: int) -> None:
        """Bring the state to the column in which a query of `num_tokens` tokens ends."""
        column = -(-(request.computed + num_tokens) // self.block_tokens) - 1
        source, request.state_column = request.state_column, column
        if 0 <= source != column:
            self._move(request, source, request.accepted - 1, column)
            request.accepted = 1

    def after(self, request: WorkerRequest) -> None:
        """Save the state at the last block boundary, if the query reached or crossed it."""
        boundary = request.computed // self.block_tokens * self.block_tokens
        first_state = request.computed - request.accepted + 1
        if boundary < first_state:
            return
        source, column = request.state_column, boundary // self.block_tokens - 1
        if source != column or boundary > first_state:
            self._move(request, source, boundary - first_state, column)
        if source == column:
            request.accepted = 1

    def _move(self, request: WorkerRequest, source: int, shift: int, column: int) -> None:
        """Copy the state `shift` tokens after `source`'s into `column`.

        The speculative columns hold one state a token; their windows are one longer list in `source`.
        """
        for group in self.groups:
            table = request.tables[group]
            for memory in self.memories:
                memory.move(group, table[source], shift, table[source + shift], table[column])
