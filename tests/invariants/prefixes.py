# SPDX-License-Identifier: Apache-2.0
"""Which token prefix each block of the toy model's KV cache holds, in fingerprints.

A block has rows of attention, or a recurrent state with its convolution window, for whichever group owns it. Writing
it as one kind destroys what it was as the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.invariants.fingerprints import EMPTY, Fingerprints, extend, spoiled
from vllm_kda_prefill.toymodel.kda import WINDOW
from vllm_kda_prefill.toymodel.kda_rows import KDARow


class Prefixes:
    """Follows all that happens to blocks (it is a `Memory`).

    Attributes:
        rows: int64 `[blocks, attention_block]`: the prefix that ends with each attention row's token.
        states: int64 `[blocks]`: the prefix whose state the block holds.
        windows: int64 `[blocks, 3 + num_spec]`: the prefix that each raw row ends.
        group: int8 `[blocks]`: KV cache group of the last writer.
    """

    def __init__(self, num_blocks: int, attention_block: int, num_spec: int) -> None:
        self.rows = np.zeros((num_blocks, attention_block), np.int64)
        self.states = np.zeros(num_blocks, np.int64)
        self.windows = np.zeros((num_blocks, WINDOW + num_spec), np.int64)
        self.group = np.full(num_blocks, -1, np.int8)

    def clear(self, block_ids: Sequence[int]) -> None:
        for held in (self.rows, self.states, self.windows):
            held[list(block_ids)] = 0

    def copy(self, source: int, destination: int) -> None:
        for held in (self.rows, self.states, self.windows, self.group):
            held[destination] = held[source]

    def move(self, group: int, window_source: int, shift: int, state_source: int, destination: int) -> None:
        window, state = self.windows[window_source, shift:].copy(), int(self.states[state_source])
        self._write_state(group, destination, state)
        self._write_window(group, destination, window)

    def run(self, group: int, row: KDARow, tokens: Sequence[int]) -> Fingerprints:
        """Follow a row of a KDA layer; the prefix that the state after each of its tokens stands for, int64 `[T]`."""
        first, prefix, before = row.block_ids[0], EMPTY, np.full(WINDOW, EMPTY, np.int64)
        if row.resumes:
            prefix = int(self.states[row.source])
            before = self.windows[first, row.offset : row.offset + WINDOW].copy()
            if before[-1] != prefix:
                prefix = spoiled(prefix, int(before[-1]))
        chain = extend(prefix, tokens)
        ends = np.concatenate([before, chain])
        if row.accepted is not None:
            for block_id, after in zip(row.block_ids, chain.tolist(), strict=False):
                self._write_state(group, block_id, after)
            self._write_window(group, first, ends[1:])
            return chain
        for after, block_id in [*row.exports.items(), (len(tokens), first)]:
            self._write_state(group, block_id, int(ends[WINDOW + after - 1]))
            self._write_window(group, block_id, ends[after : after + WINDOW])
        return chain

    def write_rows(self, group: int, block_ids: Fingerprints, offsets: Fingerprints, ends: Fingerprints) -> None:
        """Attention rows of tokens at `(block_ids, offsets)`, int64 `[T]` each, and the prefixes that they end."""
        touched = np.unique(block_ids)
        self._take(group, touched)
        self.states[touched] = 0
        self.windows[touched] = 0
        self.rows[block_ids, offsets] = ends

    def _write_state(self, group: int, block_id: int, prefix: int) -> None:
        self._take(group, np.array([block_id]))
        self.rows[block_id] = 0
        self.states[block_id] = prefix

    def _write_window(self, group: int, block_id: int, ends: Fingerprints) -> None:
        self._take(group, np.array([block_id]))
        self.rows[block_id] = 0
        self.windows[block_id, : len(ends)] = ends

    def _take(self, group: int, block_ids: Fingerprints) -> None:
        """Forget what other groups' writes left in blocks that `group` takes over."""
        taken = block_ids[self.group[block_ids] != group]
        self.rows[taken] = 0
        self.states[taken] = 0
        self.windows[taken] = 0
        self.group[block_ids] = group
