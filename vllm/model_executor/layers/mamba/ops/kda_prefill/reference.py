# SPDX-License-Identifier: Apache-2.0
"""Token-by-token KDA prefill in plain PyTorch: what every other provider is tested against."""

from __future__ import annotations

import torch

from .base import KDAPrefill, KDAPrefillInputs, WorkspaceSpec
from .checkpoints import CheckpointMetadata

L2_NORM_EPS = 1e-6


def log_decay(g: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float) -> torch.Tensor:
    """Bounded log decay `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`, natural log.

    `g` is `[..., H, 128]`; `A_log` `[H]` and `dt_bias` `[H, 128]` broadcast. The formula is
    the bounded gate of Kimi Delta Attention as GLM-5.3-Flash configures it.
    """
    return lower_bound * torch.sigmoid(A_log.exp()[:, None] * (g + dt_bias))


def l2_normalize(x: torch.Tensor) -> torch.Tensor:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS)


class ReferenceKDAPrefill(KDAPrefill):
    """The recurrence of Kimi Delta Attention (Kimi Linear report, arXiv:2510.26692), one token at a time.

    With state `S` (value x key), decay `a_t`, write strength `b_t`, unit keys and queries::

        S <- S diag(a_t);  S <- S + b_t (v_t - S k_t) k_t^T;  o_t = scale * S q_t

    Computed in `dtype` (fp64 unless told otherwise) on the device of the inputs.
    """

    name = "reference"

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.dtype = dtype

    def workspace_specs(self) -> tuple[WorkspaceSpec, ...]:
        return ()

    def _launch(
        self,
        inputs: KDAPrefillInputs,
        checkpoints: CheckpointMetadata | None,
        workspace: tuple[torch.Tensor, ...],
    ) -> None:
        bounds = inputs.cu_seqlens.tolist()
        indices = inputs.state_indices.tolist()
        resumed = inputs.has_initial_state.tolist()
        pool = inputs.state_pool
        # Sources are read for every row before any state is written: an index may be both.
        initial = [
            pool[index].to(self.dtype) if flag else torch.zeros_like(pool[0], dtype=self.dtype)
            for index, flag in zip(indices, resumed, strict=True)
        ]
        writes: list[tuple[int, torch.Tensor]] = []
        for row, state in enumerate(initial):
            begin, end = bounds[row], bounds[row + 1]
            wanted = {} if checkpoints is None else _active(checkpoints, row)
            final, exported = self._run_row(inputs, state, begin, end, wanted)
            writes += [*exported, (indices[row], final)]
        for index, state in writes:
            if 0 < index < pool.shape[0]:
                pool[index].copy_(state)

    def _run_row(
        self, inputs: KDAPrefillInputs, state: torch.Tensor, begin: int, end: int, wanted: dict[int, int]
    ) -> tuple[torch.Tensor, list[tuple[int, torch.Tensor]]]:
        def take(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[0, begin:end].to(self.dtype)

        q = l2_normalize(take(inputs.q)) * inputs.scale
        k = l2_normalize(take(inputs.k))
        v = take(inputs.v)
        beta = torch.sigmoid(take(inputs.beta))[..., None]
        decay = log_decay(
            take(inputs.g), inputs.A_log.to(self.dtype), inputs.dt_bias.to(self.dtype), inputs.lower_bound
        ).exp()
        exported: list[tuple[int, torch.Tensor]] = []
        out = torch.empty_like(v)
        for t in range(end - begin):
            state = state * decay[t, :, None, :]
            error = beta[t] * (v[t] - (state @ k[t, :, :, None]).squeeze(-1))
            state = state + error[:, :, None] * k[t, :, None, :]
            out[t] = (state @ q[t, :, :, None]).squeeze(-1)
            if t + 1 in wanted:
                exported.append((wanted[t + 1], state))
        inputs.out[0, begin:end] = out.to(inputs.out.dtype)
        return state, exported


def _active(checkpoints: CheckpointMetadata, row: int) -> dict[int, int]:
    """Offset to state index of one row's active entries."""
    pairs = zip(checkpoints.checkpoint_offsets[row].tolist(), checkpoints.state_indices[row].tolist(), strict=True)
    return {offset: index for offset, index in pairs if offset > 0 and index > 0}
