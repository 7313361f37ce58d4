# SPDX-License-Identifier: Apache-2.0
"""One causal attention layer in fp64 with rotary positions.

Symbols: `T` query tokens, `N` tokens of context with them, `D` model width, `H` heads, `K` head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class AttentionLayer:
    """Multi-head attention over a prefix; what it caches of a token is one row `[2, H, K]` (key, value)."""

    def __init__(self, width: int, heads: int, head_size: int, generator: torch.Generator) -> None:
        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[0])

        self.heads, self.head_size = heads, head_size
        self.w_qkv = weight(width, 3 * heads * head_size)
        self.w_out = weight(heads * head_size, width)
        self.frequencies = 10000.0 ** -torch.linspace(0, 1, head_size // 2, dtype=torch.float64)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Queries `[T, H, K]` and cache rows `[T, 2, H, K]` of normalized hidden rows `[T, D]`."""
        q, k, v = (x @ self.w_qkv).unflatten(-1, (3, self.heads, self.head_size)).unbind(1)
        angles = positions[:, None, None] * self.frequencies
        return self._rotate(q, angles), torch.stack([self._rotate(k, angles), v], 1)

    @staticmethod
    def _rotate(x: Tensor, angles: Tensor) -> Tensor:
        even, odd = x.chunk(2, -1)
        sin, cos = angles.sin(), angles.cos()
        return torch.cat([even * cos - odd * sin, even * sin + odd * cos], -1)

    def attend(self, q: Tensor, rows: Tensor) -> Tensor:
        """Attention of the last `T` tokens of a context.

        Args:
            q: Queries `[T, H, K]`.
            rows: Cache rows `[N, 2, H, K]` of the whole context, the queries' own at its end.

        Returns:
            `[T, D]`.
        """
        tokens, context = len(q), len(rows)
        k, v = rows.permute(1, 2, 0, 3).unbind(0)
        scores = q.transpose(0, 1) @ k.transpose(1, 2) / math.sqrt(self.head_size)
        ahead = torch.ones(tokens, context, dtype=torch.bool).triu(context - tokens + 1)
        weights = scores.masked_fill(ahead, -math.inf).softmax(-1)
        return (weights @ v).transpose(0, 1).flatten(1) @ self.w_out
