# SPDX-License-Identifier: Apache-2.0
"""The KV cache's bytes: one buffer of pages that all groups share, and a shadow of what each page holds.

As in vLLM's hybrid models a page is an attention block, or a recurrent state with its convolution window, for
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


class Pages:
    """Page contents in fp64, and their shadow in fingerprints.

    Attributes:
        attention_block: Tokens of an attention page.
        rows: View `[pages, attention_block, 2, heads, head_size]`: keys and values.
        states: View `[pages, heads, head_size, head_size]`: recurrent states.
        windows: View `[pages, 3 + num_spec, channels]`: raw convolution rows, oldest first.
        row_shadow: int64 `[pages, attention_block]`: the prefix that ends with each row's token.
        state_shadow: int64 `[pages]`: the prefix whose state the page holds.
        window_shadow: int64 `[pages, 3 + num_spec]`: the prefix each raw row ends.
        group: int8 `[pages]`: KV cache group of the last writer.
    """

    def __init__(self, num_pages: int, attention_block: int, num_spec: int, sizes: ModelSizes) -> None:
        row = (attention_block, 2, sizes.heads, sizes.head_size)
        state = (sizes.heads, sizes.head_size, sizes.head_size)
        window = (WINDOW + num_spec, sizes.kda.channels)
        row_size, state_size, window_size = (int(np.prod(shape)) for shape in (row, state, window))
        # Unwritten memory is NaN, so that reading it cannot go unnoticed.
        self._buffer = torch.full((num_pages, max(row_size, state_size + window_size)), torch.nan, dtype=torch.float64)
        self.attention_block = attention_block
        self.rows = self._buffer[:, :row_size].unflatten(1, row)
        self.states = self._buffer[:, :state_size].unflatten(1, state)
        self.windows = self._buffer[:, state_size : state_size + window_size].unflatten(1, window)
        self.row_shadow = np.zeros((num_pages, attention_block), np.int64)
        self.state_shadow = np.zeros(num_pages, np.int64)
        self.window_shadow = np.zeros((num_pages, window[0]), np.int64)
        self.group = np.full(num_pages, -1, np.int8)

    def __len__(self) -> int:
        return len(self._buffer)

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages, as vLLM does before an attention group writes a recycled one."""
        self._buffer[list(pages)] = 0.0
        for shadow in (self.row_shadow, self.state_shadow, self.window_shadow):
            shadow[list(pages)] = 0

    def copy(self, source: int, destination: int) -> None:
        """Copy a whole page."""
        self._buffer[destination] = self._buffer[source]
        for shadow in (self.row_shadow, self.state_shadow, self.window_shadow, self.group):
            shadow[destination] = shadow[source]

    def write_rows(self, group: int, pages: Tensor, offsets: Tensor, rows: Tensor, prefixes: Fingerprints) -> None:
        """Write one attention row `[2, heads, head_size]` a token at `(pages, offsets)`, int64 `[T]` each."""
        touched = pages.unique().numpy()
        self._owned_by(group, touched)
        self.state_shadow[touched] = 0
        self.window_shadow[touched] = 0
        self.rows[pages, offsets] = rows
        self.row_shadow[pages.numpy(), offsets.numpy()] = prefixes

    def write_state(self, group: int, page: int, state: Tensor, prefix: int) -> None:
        """Write a recurrent state `[heads, head_size, head_size]`."""
        self._owned_by(group, np.array([page]))
        self.row_shadow[page] = 0
        self.states[page] = state
        self.state_shadow[page] = prefix

    def write_window(self, group: int, page: int, rows: Tensor, prefixes: Fingerprints) -> None:
        """Write the first `len(rows)` raw rows of a window and leave the cells behind them."""
        self._owned_by(group, np.array([page]))
        self.row_shadow[page] = 0
        self.windows[page, : len(rows)] = rows
        self.window_shadow[page, : len(rows)] = prefixes

    def _owned_by(self, group: int, pages: Fingerprints) -> None:
        """Forget what other groups' writes left in pages that `group` takes over."""
        assert pages.all(), "page 0 is vLLM's null block: nothing may be written there"
        taken = pages[self.group[pages] != group]
        self.row_shadow[taken] = 0
        self.state_shadow[taken] = 0
        self.window_shadow[taken] = 0
        self.group[pages] = group
