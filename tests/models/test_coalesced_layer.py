# SPDX-License-Identifier: Apache-2.0
"""What a KDA layer runs for a prefill: the op on the batch's own states, the convolution history, stock's kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.conftest import (
    CELLS,
    HEADS,
    TOKENS,
    WIDTH,
    gather,
    give_parameters,
    new_batch,
    planned,
    windows_of,
)
from vllm.model_executor.layers.mamba.ops.kda_prefill import reference, segmented
from vllm.models.glm5next import coalesced
from vllm.models.glm5next.common.kda import Glm5NextLinearAttention
from vllm.v1.attention.backends.gdn_checkpoint import CheckpointedGDNBackend


def prefill(layer, batch, checkpoint, out=None):
    """Call the layer as stock's forward does; return its answer, the raw rows and the convolution pool."""
    inputs = batch.inputs
    give_parameters(layer, inputs)
    raw = torch.randn(TOKENS, WIDTH).to(torch.bfloat16)
    windows = windows_of(batch)
    with torch.no_grad():
        answer = layer._flashkda_prefill(
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            g=inputs.g,
            beta=inputs.beta,
            initial_state=coalesced.PoolStates(inputs.state_pool, inputs.state_indices, inputs.has_initial_state),
            cu_seqlens=inputs.cu_seqlens,
            out=out,
            checkpoint=checkpoint,
            raw_qkv=raw,
            conv_state=windows,
            recurrent_state=inputs.state_pool,
        )
    return answer, raw, windows


@pytest.mark.parametrize("own_output", [True, False], ids=["into the output", "into the workspace"])
def test_a_planned_prefill_writes_every_state_and_window(layer, batch, copies, own_output):
    expected = new_batch()
    reference.ReferenceKDAPrefill().run(expected.inputs, expected.checkpoints)
    out = batch.inputs.out if own_output else None
    (output, final), raw, windows = prefill(layer, batch, planned(batch), out)

    torch.testing.assert_close(output, expected.out, rtol=0.02, atol=0.02)
    torch.testing.assert_close(batch.pool, expected.pool, rtol=1e-3, atol=1e-3)
    assert final is None, "final states are in the pool, and stock has none to write"
    assert not copies
    starts = batch.inputs.cu_seqlens.tolist()
    written = set()
    for row, indices in enumerate(batch.checkpoints.state_indices.tolist()):
        for offset, index in zip(batch.checkpoints.checkpoint_offsets[row].tolist(), indices, strict=True):
            if index:
                end = starts[row] + offset
                assert torch.equal(windows[index, :, :3], raw[end - 3 : end].T)
                written.add(index)
    assert len(written) == 5
    assert (windows[:, :, 3:] == 7.0).all(), "speculative cells are not the checkpoint's"
    assert all((windows[index] == 7.0).all() for index in set(range(len(windows))) - written)


def test_bad_metadata_stops_the_layer_before_anything_is_written(layer, batch):
    checkpoint = planned(batch)
    checkpoint.host_offsets[0][1] = 47
    with pytest.raises(ValueError, match="checkpoint offset 47 is not a multiple of 16"):
        prefill(layer, batch, checkpoint)
    assert torch.equal(batch.pool, batch.pool_before)


def test_without_plans_stocks_call_runs_or_the_chosen_kernel(layer, batch, copies, monkeypatch):
    called = []

    def stock(self, *args):
        called.append(args)
        return "out", "final"

    monkeypatch.setattr(Glm5NextLinearAttention, "_flashkda_prefill", stock)
    answer, _, windows = prefill(layer, batch, None)
    if layer.kda_prefill.defers_to_stock:
        assert answer == ("out", "final")
        given = called[0][5]
        assert torch.equal(given, gather(batch.pool_before, batch.inputs.state_indices, batch.inputs.has_initial_state))
        assert copies == ["gather"]
    else:
        expected = new_batch(None)
        reference.ReferenceKDAPrefill().run(expected.inputs, None)
        torch.testing.assert_close(answer[0], expected.out, rtol=0.02, atol=0.02)
        assert answer[1] is None
        assert not called
        assert not copies
    assert (windows == 7.0).all()


@pytest.mark.parametrize("dim_first", [True, False], ids=["DS", "SD"])
def test_warm_up_exports_nothing_in_the_first_exports_shapes(layer, monkeypatch, dim_first):
    layer._conv_state_dim_first = dim_first
    layer.in_proj_qkvbfg_a = SimpleNamespace(output_size_per_partition=WIDTH + HEADS + 256)
    windows = torch.full((9, WIDTH, CELLS) if dim_first else (9, CELLS, WIDTH), 7.0, dtype=torch.bfloat16)
    states = torch.full((9, HEADS, 128, 128), 3.0)
    layer.kv_cache = (windows, states)
    moved = []

    def noting(name):
        move = getattr(segmented, name)

        def note_and_move(*tensors):
            moved.append(name)
            move(*tensors)

        return note_and_move

    for name in ("gather_states", "scatter_states"):
        monkeypatch.setattr(segmented, name, noting(name))
    calls = []
    export = coalesced.export_conv_history

    def export_and_note(*arguments):
        calls.append(arguments)
        export(*arguments)

    monkeypatch.setattr(coalesced, "export_conv_history", export_and_note)
    layer.warm_up_export()
    ((raw, pool, _, checkpoints, state_len),) = calls
    assert raw.shape[1] == pool.shape[1] == WIDTH
    assert (raw.stride(), state_len) == ((WIDTH + HEADS + 256, 1), 3)
    assert checkpoints.checkpoint_offsets.shape == checkpoints.state_indices.shape == (1, 4)
    assert moved == (["gather_states", "scatter_states"] if layer.kda_prefill.name != "reference" else [])
    assert (windows == 7.0).all()
    assert (states == 3.0).all()


def test_the_layer_asks_for_the_builder_that_takes_plans(layer):
    assert layer.get_attn_backend() is CheckpointedGDNBackend


@pytest.mark.parametrize(
    ("additional", "shown"),
    [
        ({"kda_prefill_backend": "reference", "other": 1}, {"kda_prefill_backend": "flashkda", "other": 1}),
        ({"kda_prefill_backend": "flashkda"}, {"kda_prefill_backend": "flashkda"}),
        (None, None),
    ],
)
def test_stocks_model_builds_this_layer_with_a_backend_it_knows(monkeypatch, additional, shown):
    chosen = []

    def stock_init(self, config, vllm_config, prefix):
        nn.Module.__init__(self)
        assert vllm_config.additional_config == shown
        assert prefix == "layers.0.self_attn"

    def select(self, backend, vllm_config):
        chosen.append(backend)
        assert vllm_config is given
        return reference.ReferenceKDAPrefill()

    monkeypatch.setattr(Glm5NextLinearAttention, "__init__", stock_init)
    monkeypatch.setattr(coalesced.CoalescedLinearAttention, "_select", select)
    given: Any = SimpleNamespace(additional_config=additional)
    layer = Glm5NextLinearAttention(config=None, vllm_config=given, prefix="layers.0.self_attn")
    assert type(layer) is coalesced.CoalescedLinearAttention
    assert layer.kda_prefill.name == "reference"
    assert chosen == [(additional or {}).get("kda_prefill_backend", "auto")]
    assert given.additional_config == additional
