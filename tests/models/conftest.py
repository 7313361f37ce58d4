# SPDX-License-Identifier: Apache-2.0
"""A KDA layer without weights, with a provider that runs on the CPU, and batches for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.kernels.mamba.conftest import make_batch
from tests.kernels.mamba.reference_launcher import ReferenceLauncher
from vllm.model_executor.layers.mamba.ops.kda_prefill import reference, segmented
from vllm.models.glm5next import coalesced
from vllm.v1.attention.backends.gdn_checkpoint import PlannedCheckpointMetadata

LENS = (96, 33)
OFFSETS = ([32, 48, 64, 80], [16])
TOKENS = sum(LENS)
HEADS, CELLS = 2, 3 + 2
WIDTH = 3 * HEADS * 128


class Workspace:
    """Hands out poisoned buffers, as the shared workspace holds whatever was there."""

    def get_simultaneous(self, *specs):
        return [torch.full(shape, 77, dtype=dtype) for shape, dtype in specs]


def gather(state, indices, has_initial_state):
    """What stock's gather kernel does."""
    rows = state[indices.long()].clone()
    rows[~has_initial_state] = 0
    return rows


@pytest.fixture
def copies(monkeypatch):
    """Stock's copies out of and into the pool, as they are made."""
    made: list[str] = []

    def gather_and_note(*arguments):
        made.append("gather")
        return gather(*arguments)

    def scatter_and_note(pool, rows, indices):
        made.append("scatter")
        pool[indices.long()] = rows

    monkeypatch.setattr(coalesced, "gather_initial_states", gather_and_note)
    monkeypatch.setattr(coalesced, "scatter_states", scatter_and_note)
    return made


@pytest.fixture(params=["segmented", "one launch"])
def layer(request, monkeypatch, copies):
    layer: Any = coalesced.CoalescedLinearAttention.__new__(coalesced.CoalescedLinearAttention)
    nn.Module.__init__(layer)
    layer.head_dim, layer.conv_size, layer.kda_lower_bound, layer.prefix = 128, 4, -5.0, "kda.0"
    out = ((1, 256, HEADS, 128), torch.bfloat16)
    layer._flashkda_buffer_specs = (None, None, None, out)
    sizes = {"num_heads": HEADS, "max_num_tokens": 256, "max_num_seqs": 4}
    layer.kda_prefill = (
        segmented.SegmentedKDAPrefill(ReferenceLauncher(), **sizes)
        if request.param == "segmented"
        else reference.ReferenceKDAPrefill()
    )
    monkeypatch.setattr(coalesced, "current_workspace_manager", Workspace)
    return layer


def new_batch(offsets=OFFSETS):
    return make_batch(LENS, offsets, heads=HEADS, gate=(-4.0, 1.0), resumed=(True, False))


@pytest.fixture
def batch():
    return new_batch()


def give_parameters(layer, inputs):
    layer.A_log = nn.Parameter(inputs.A_log.view(1, 1, -1, 1))
    layer.dt_bias = nn.Parameter(inputs.dt_bias.reshape(-1))


def windows_of(batch):
    return torch.full((batch.pool.shape[0], WIDTH, CELLS), 7.0, dtype=torch.bfloat16)


def planned(batch):
    checkpoints = batch.checkpoints
    return PlannedCheckpointMetadata(
        checkpoint_offsets=checkpoints.checkpoint_offsets,
        state_indices=checkpoints.state_indices,
        batch_rows=[0, 1],
        host_offsets=checkpoints.checkpoint_offsets.tolist(),
        host_state_indices=checkpoints.state_indices.tolist(),
        host_query_lens=list(LENS),
    )
