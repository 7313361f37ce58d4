# SPDX-License-Identifier: Apache-2.0
"""A launcher of the segmented provider that computes with the reference, so that it runs on the CPU."""

from __future__ import annotations

import torch

from vllm.model_executor.layers.mamba.ops.kda_prefill import Checkpoints, KDAPrefillInputs
from vllm.model_executor.layers.mamba.ops.kda_prefill.reference import ReferenceKDAPrefill
from vllm.model_executor.layers.mamba.ops.kda_prefill.segmented import Launch, Launcher, SegmentedKDAPrefill


class ReferenceLauncher(Launcher):
    """A one-checkpoint kernel made of the reference, that counts what it was asked to do."""

    name = "fake"

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def workspace_specs(self):
        return (((1,), torch.uint8),)

    def __call__(self, launch: Launch, workspace) -> None:
        rows = launch.initial.shape[0]
        self.tokens.append(launch.q.shape[1])
        states = torch.cat([torch.zeros_like(launch.initial[:1]), launch.initial, launch.initial])
        inputs = _inputs_of(launch, states, rows)
        offsets = torch.zeros(rows, 4, dtype=torch.int32)
        if launch.checkpoint_offsets is not None:
            assert launch.checkpoint_offsets.dtype == launch.cu_seqlens.dtype
            offsets[:, 0] = launch.checkpoint_offsets
        indices = torch.zeros_like(offsets)
        indices[:, 0] = torch.arange(rows + 1, 2 * rows + 1) * (offsets[:, 0] > 0)
        lens = launch.cu_seqlens.diff().tolist()
        ReferenceKDAPrefill().run(inputs, Checkpoints(offsets, indices, offsets.tolist(), lens, indices.tolist()))
        launch.final.copy_(states[1 : rows + 1])
        if launch.checkpoint is not None:
            launch.checkpoint.copy_(states[rows + 1 :])


def _inputs_of(launch: Launch, states: torch.Tensor, rows: int):
    return KDAPrefillInputs(
        q=launch.q,
        k=launch.k,
        v=launch.v,
        g=launch.g,
        beta=launch.beta,
        A_log=launch.A_log,
        dt_bias=launch.dt_bias,
        scale=launch.scale,
        lower_bound=launch.lower_bound,
        cu_seqlens=launch.cu_seqlens,
        state_pool=states,
        state_indices=torch.arange(1, rows + 1, dtype=torch.int32),
        has_initial_state=torch.ones(rows, dtype=torch.bool),
        out=launch.out,
    )


def segmented() -> SegmentedKDAPrefill:
    return SegmentedKDAPrefill(ReferenceLauncher(), num_heads=2, max_num_tokens=512, max_num_seqs=8)
