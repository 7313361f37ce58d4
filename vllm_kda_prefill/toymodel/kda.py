# SPDX-License-Identifier: Apache-2.0
"""One layer of Kimi Delta Attention in fp64: short convolution, bounded gate, delta-rule recurrence.

Symbols of one row: `T` tokens, `D` model width, `H` heads, `K` head size, `C = 3·H·K` raw q|k|v channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from vllm.v1.core.prefill_plan import CHECKPOINT_ALIGNMENT

CONV_WIDTH = 4
WINDOW = CONV_WIDTH - 1
"""Raw rows before a token that its convolution reads."""

GATE_FLOOR = -5.0
"""Lower bound of the log decay."""


@dataclass(frozen=True)
class KDASizes:
    """Sizes of one layer: model width, heads, head size."""

    width: int
    heads: int
    head_size: int

    @property
    def channels(self) -> int:
        """Raw q|k|v channels that the convolution runs over."""
        return 3 * self.heads * self.head_size


@dataclass(frozen=True)
class KDAInputs:
    """What the recurrence reads, all fp64: `q`, `k`, `v`, `log_decay` `[H, T, K]`, `beta` `[H, T]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor


class KDALayer:
    """The layer's weights and its two forms, chunked and token by token.

    The state after a prefix is `[H, K, K]` (key x value); with decay `a_t`, write strength `b_t`, unit keys::

        S <- diag(a_t) S;  S <- S + b_t k_t (v_t - S^T k_t)^T;  o_t = S^T q_t

    Decays are mild and write strengths low, so that a state is felt for hundreds of tokens.
    """

    def __init__(self, sizes: KDASizes, generator: torch.Generator) -> None:
        self.sizes = sizes
        inner = sizes.heads * sizes.head_size

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[0])

        self.w_qkv = weight(sizes.width, sizes.channels)
        self.w_conv = weight(CONV_WIDTH, sizes.channels)
        self.w_gate = weight(sizes.width, inner)
        self.w_beta = weight(sizes.width, sizes.heads)
        self.w_out = weight(inner, sizes.width)

    def initial_state(self) -> Tensor:
        """The state of the empty prefix, `[H, K, K]` zeros."""
        heads, size = self.sizes.heads, self.sizes.head_size
        return torch.zeros(heads, size, size, dtype=torch.float64)

    def raw(self, x: Tensor) -> Tensor:
        """Raw q|k|v rows `[T, C]` of normalized hidden rows `[T, D]`."""
        return x @ self.w_qkv

    def inputs(self, x: Tensor, raw: Tensor, window: Tensor) -> KDAInputs:
        """Convolve, activate and normalize.

        Args:
            x: Normalized hidden rows `[T, D]`.
            raw: Their raw rows `[T, C]`.
            window: The three raw rows before them, `[3, C]`, zeros at a prompt's start.
        """
        tokens = len(raw)
        rows = torch.cat([window, raw])
        mixed = sum(rows[i : i + tokens] * self.w_conv[i] for i in range(CONV_WIDTH))
        q, k, v = self._heads(functional.silu(torch.as_tensor(mixed))).split(self.sizes.head_size, dim=-1)
        gate = self._heads(x @ self.w_gate)
        return KDAInputs(
            q=functional.normalize(q, dim=-1, eps=1e-6) / math.sqrt(self.sizes.head_size),
            k=functional.normalize(k, dim=-1, eps=1e-6),
            v=v,
            log_decay=GATE_FLOOR * torch.sigmoid(gate - 7.0),
            beta=torch.sigmoid((x @ self.w_beta).T - 2.0),
        )

    def _heads(self, rows: Tensor) -> Tensor:
        """`[T, H·n]` -> `[H, T, n]`."""
        return rows.unflatten(-1, (self.sizes.heads, -1)).transpose(0, 1)

    def project(self, out: Tensor) -> Tensor:
        """Outputs of the recurrence `[H, T, K]` -> `[T, D]`."""
        return out.transpose(0, 1).flatten(1) @ self.w_out

    @staticmethod
    def step(inputs: KDAInputs, token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """One token of the recurrence: its output `[H, K]` and the state after it."""
        state = state * inputs.log_decay[:, token, :, None].exp()
        key = inputs.k[:, token, :, None]
        error = inputs.v[:, token, None, :] - key.transpose(1, 2) @ state
        state = state + inputs.beta[:, token, None, None] * key * error
        return (inputs.q[:, token, None, :] @ state)[:, 0], state

    @staticmethod
    def chunked(inputs: KDAInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        """All tokens of a row, sixteen at a time.

        Inside a chunk the delta rule is a triangular system; between chunks the state moves by an affine
        map, so only a small matrix product a chunk is sequential.

        Args:
            inputs: `T` tokens.
            state: State before the first, `[H, K, K]`.

        Returns:
            Outputs `[H, T, K]`, and states `[chunks + 1, H, K, K]`: entry `i` after `16·i` tokens, the last
            after all `T`.
        """
        tokens = inputs.q.shape[1]
        padding = -tokens % CHECKPOINT_ALIGNMENT

        def chunks(x: Tensor) -> Tensor:
            padded = functional.pad(x, (0, 0) * (x.dim() - 2) + (0, padding))
            return padded.unflatten(1, (-1, CHECKPOINT_ALIGNMENT))

        # A padded token has k = 0, beta = 0 and no decay: it leaves the state alone.
        q, k, v = chunks(inputs.q), chunks(inputs.k), chunks(inputs.v)
        beta = chunks(inputs.beta)[..., None]
        decay = chunks(inputs.log_decay).cumsum(2)
        k_in, k_out, q_in = k * decay.exp(), k * (-decay).exp(), q * decay.exp()
        system = torch.eye(CHECKPOINT_ALIGNMENT, dtype=torch.float64) + (beta * (k_in @ k_out.transpose(2, 3))).tril(-1)
        solved = torch.linalg.solve_triangular(
            system, torch.cat([beta * v, beta * k_in], -1), upper=False, unitriangular=True
        )
        values, keys = solved.split(v.shape[-1], dim=-1)
        total = decay[:, :, -1]
        k_end = (k * (total[:, :, None] - decay).exp()).transpose(2, 3)
        moves = torch.diag_embed(total.exp()) - k_end @ keys
        adds = k_end @ values
        states = [state]
        for move, add in zip(moves.unbind(1), adds.unbind(1), strict=True):
            states.append(torch.baddbmm(add, move, states[-1]))
        before = torch.stack(states[:-1], 1)
        written = values - keys @ before
        out = q_in @ before + (q_in @ k_out.transpose(2, 3)).tril() @ written
        return out.flatten(1, 2)[:, :tokens], torch.stack(states)
