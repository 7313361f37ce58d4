# SPDX-License-Identifier: Apache-2.0
"""The KV cache's bytes: one buffer of blocks that all groups share.

As in vLLM's hybrid models a block has rows of attention, or a recurrent state with its convolution window, for
whichever group owns it. Writing it as one kind destroys what it was as the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from vllm_kda_prefill.toymodel.kda import WINDOW
from vllm_kda_prefill.toymodel.model import ModelSizes

NULL_BLOCK = "block 0 is vLLM's null block: nothing may be written there"


class Memory(Protocol):
    """What a worker zeroes, copies and moves between blocks."""

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero blocks, as vLLM does before an attention group writes a recycled one."""

    def copy(self, source: int, destination: int) -> None:
        """Copy a whole block."""

    def move(self, group: int, window_source: int, shift: int, state_source: int, destination: int) -> None:
        """Copy a recurrent state, and the convolution window that begins `shift` rows into another block's.

        Args:
            group: KV cache group of all blocks.
            window_source: Block of the window.
            shift: Rows of it to leave out.
            state_source: Block of the state.
            destination: Block that gets both.
        """


class Blocks:
    """Contents of blocks in fp64.

    Attributes:
        attention_block: Tokens of an attention block.
        rows: View `[blocks, attention_block, 2, heads, head_size]`: keys and values.
        states: View `[blocks, heads, head_size, head_size]`: recurrent states.
        windows: View `[blocks, 3 + num_spec, channels]`: raw convolution rows, oldest first.
    """

    def __init__(self, num_blocks: int, attention_block: int, num_spec: int, sizes: ModelSizes) -> None:
        row = (attention_block, 2, sizes.heads, sizes.head_size)
        state = (sizes.heads, sizes.head_size, sizes.head_size)
        window = (WINDOW + num_spec, sizes.kda.channels)
        row_size, state_size, window_size = (int(np.prod(shape)) for shape in (row, state, window))
        # Unwritten memory is NaN, so that reading it cannot go unnoticed.
        self._buffer = torch.full((num_blocks, max(row_size, state_size + window_size)), torch.nan, dtype=torch.float64)
        self.attention_block = attention_block
        self.rows = self._buffer[:, :row_size].unflatten(1, row)
        self.states = self._buffer[:, :state_size].unflatten(1, state)
        self.windows = self._buffer[:, state_size : state_size + window_size].unflatten(1, window)

    def __len__(self) -> int:
        return len(self._buffer)

    def clear(self, block_ids: Sequence[int]) -> None:
        """See `Memory`."""
        self._buffer[list(block_ids)] = 0.0

    def copy(self, source: int, destination: int) -> None:
        """See `Memory`."""
        self._buffer[destination] = self._buffer[source]

    def move(self, group: int, window_source: int, shift: int, state_source: int, destination: int) -> None:
        """See `Memory`."""
        window, state = self.windows[window_source, shift:].clone(), self.states[state_source].clone()
        self.write_state(destination, state)
        self.write_window(destination, window)

    def write_rows(self, block_ids: Tensor, offsets: Tensor, rows: Tensor) -> None:
        """Write one attention row `[2, heads, head_size]` a token at `(block_ids, offsets)`, int64 `[T]` each."""
        assert block_ids.all(), NULL_BLOCK
        self.rows[block_ids, offsets] = rows

    def write_state(self, block_id: int, state: Tensor) -> None:
        """Write a recurrent state `[heads, head_size, head_size]`."""
        assert block_id, NULL_BLOCK
        self.states[block_id] = state

    def write_window(self, block_id: int, rows: Tensor) -> None:
        """Write the first `len(rows)` raw rows of a window and leave the cells behind them."""
        assert block_id, NULL_BLOCK
        self.windows[block_id, : len(rows)] = rows
