# SPDX-License-Identifier: Apache-2.0
"""The KV cache's bytes: one buffer of blocks that all groups share, and a shadow of what each block holds.

As in vLLM's hybrid models a block has rows of attention, or a recurrent state with its convolution window, for
whichever group owns it. Writing it as one kind destroys what it was as the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vllm_kda_prefill.toymodel.fingerprints import Fingerprints
from vllm_kda_prefill.toymodel.kda import WINDOW
from vllm_kda_prefill.toymodel.model import ModelSizes


class Blocks:
    """Contents of blocks in fp64, and their shadow in fingerprints.

    Attributes:
        attention_block: Tokens of an attention block.
        rows: View `[blocks, attention_block, 2, heads, head_size]`: keys and values.
        states: View `[blocks, heads, head_size, head_size]`: recurrent states.
        windows: View `[blocks, 3 + num_spec, channels]`: raw convolution rows, oldest first.
        row_shadow: int64 `[blocks, attention_block]`: the prefix that ends with each row's token.
        state_shadow: int64 `[blocks]`: the prefix whose state the block holds.
        window_shadow: int64 `[blocks, 3 + num_spec]`: the prefix each raw row ends.
        group: int8 `[blocks]`: KV cache group of the last writer.
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
        self.row_shadow = np.zeros((num_blocks, attention_block), np.int64)
        self.state_shadow = np.zeros(num_blocks, np.int64)
        self.window_shadow = np.zeros((num_blocks, window[0]), np.int64)
        self.group = np.full(num_blocks, -1, np.int8)

    def __len__(self) -> int:
        return len(self._buffer)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero blocks, as vLLM does before an attention group writes a recycled one."""
        self._buffer[list(block_ids)] = 0.0
        for shadow in (self.row_shadow, self.state_shadow, self.window_shadow):
            shadow[list(block_ids)] = 0

    def copy(self, source: int, destination: int) -> None:
        """Copy a whole block."""
        self._buffer[destination] = self._buffer[source]
        for shadow in (self.row_shadow, self.state_shadow, self.window_shadow, self.group):
            shadow[destination] = shadow[source]

    def write_rows(self, group: int, block_ids: Tensor, offsets: Tensor, rows: Tensor, prefixes: Fingerprints) -> None:
        """Write one attention row `[2, heads, head_size]` a token at `(block_ids, offsets)`, int64 `[T]` each."""
        touched = block_ids.unique().numpy()
        self._owned_by(group, touched)
        self.state_shadow[touched] = 0
        self.window_shadow[touched] = 0
        self.rows[block_ids, offsets] = rows
        self.row_shadow[block_ids.numpy(), offsets.numpy()] = prefixes

    def write_state(self, group: int, block_id: int, state: Tensor, prefix: int) -> None:
        """Write a recurrent state `[heads, head_size, head_size]`."""
        self._owned_by(group, np.array([block_id]))
        self.row_shadow[block_id] = 0
        self.states[block_id] = state
        self.state_shadow[block_id] = prefix

    def write_window(self, group: int, block_id: int, rows: Tensor, prefixes: Fingerprints) -> None:
        """Write the first `len(rows)` raw rows of a window and leave the cells behind them."""
        self._owned_by(group, np.array([block_id]))
        self.row_shadow[block_id] = 0
        self.windows[block_id, : len(rows)] = rows
        self.window_shadow[block_id, : len(rows)] = prefixes

    def _owned_by(self, group: int, block_ids: Fingerprints) -> None:
        """Forget what other groups' writes left in blocks that `group` takes over."""
        assert block_ids.all(), "block 0 is vLLM's null block: nothing may be written there"
        taken = block_ids[self.group[block_ids] != group]
        self.row_shadow[taken] = 0
        self.state_shadow[taken] = 0
        self.window_shadow[taken] = 0
        self.group[block_ids] = group
