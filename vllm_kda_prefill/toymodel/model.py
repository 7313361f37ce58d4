# SPDX-License-Identifier: Apache-2.0
"""A small decoder whose every output depends on the whole prefix: KDA layers, one attention layer, logits.

The KDA layers come first and the attention layer caches what they computed, so a wrong state anywhere in a
prompt stays visible in the last token's logits however far behind it lies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kda_prefill.toymodel.attention import AttentionLayer
from vllm_kda_prefill.toymodel.kda import WINDOW, KDALayer, KDASizes


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the model; the defaults make 8,192 tokens a matter of about a second on one core.

    Attributes:
        vocabulary: Token ids are below this.
        width: Hidden width.
        heads: Heads of each layer.
        head_size: Head size of each layer, even.
        kda_layers: KDA layers, one a Mamba KV cache group.
        seed: Of the weights.
    """

    vocabulary: int = 64
    width: int = 32
    heads: int = 2
    head_size: int = 8
    kda_layers: int = 1
    seed: int = 0

    @property
    def kda(self) -> KDASizes:
        return KDASizes(self.width, self.heads, self.head_size)


class ToyModel:
    """Weights and layers. All arithmetic is fp64 on the CPU, and deterministic."""

    def __init__(self, sizes: ModelSizes) -> None:
        generator = torch.Generator().manual_seed(sizes.seed)
        self.sizes = sizes
        self.embedding = torch.randn(sizes.vocabulary, sizes.width, generator=generator, dtype=torch.float64)
        self.kda = [KDALayer(sizes.kda, generator) for _ in range(sizes.kda_layers)]
        self.attention = AttentionLayer(sizes.width, sizes.heads, sizes.head_size, generator)
        head = torch.randn(sizes.width, sizes.vocabulary, generator=generator, dtype=torch.float64)
        self.head = head / math.sqrt(sizes.width)

    @staticmethod
    def norm(hidden: Tensor) -> Tensor:
        """Root-mean-square normalization of `[T, D]`."""
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[T, D]` -> `[T, vocabulary]`."""
        return self.norm(hidden) @ self.head

    def uncached(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Logits `[len(positions), vocabulary]` after the tokens at `positions`, without any cache."""
        hidden = self.embedding[torch.tensor(tokens)]
        for layer in self.kda:
            x = self.norm(hidden)
            raw = layer.raw(x)
            inputs = layer.inputs(x, raw, raw.new_zeros(WINDOW, raw.shape[1]))
            hidden = hidden + layer.project(layer.chunked(inputs, layer.initial_state())[0])
        q, rows = self.attention.project(self.norm(hidden), torch.arange(len(tokens)))
        # Only the asked-for positions need the quadratic part.
        attended = [self.attention.attend(q[p : p + 1], rows[: p + 1]) for p in positions]
        return self.logits(hidden[list(positions)] + torch.cat(attended))
