"""What a KDA layer runs for a prefill with plans: the op, on the batch's own pages, and the convolution history."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.kernels.mamba.conftest import make_batch
from tests.kernels.mamba.test_kda_prefill_contract import ReferenceLauncher
from vllm.model_executor.layers.mamba.ops.kda_prefill import reference, segmented
from vllm.models.glm5next import coalesced
from vllm.models.glm5next.common.kda import Glm5NextLinearAttention
from vllm.plugins.kda_prefill_coalescing.config_check import backend_choice
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.gdn_checkpoint import CheckpointedGDNBackend, PlannedCheckpointMetadata

LENS = (96, 33)
OFFSETS = ([32, 48, 64, 80], [16])
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


@pytest.fixture(params=["segmented", "one launch"])
def layer(request, monkeypatch):
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
    monkeypatch.setattr(coalesced, "gather_initial_states", gather)
    return layer


@pytest.fixture
def batch():
    return make_batch(LENS, OFFSETS, heads=HEADS, gate=(-4.0, 1.0), resumed=(True, False))


def prefill(layer, batch, monkeypatch, checkpoint, out=None):
    """Call the layer as stock's forward does; return its answer, the raw rows and the convolution pool."""
    inputs = batch.inputs
    layer.A_log = nn.Parameter(inputs.A_log.view(1, 1, -1, 1))
    layer.dt_bias = nn.Parameter(inputs.dt_bias.reshape(-1))
    metadata = GDNAttentionMetadata(
        num_prefills=2,
        num_prefill_tokens=sum(LENS),
        num_decodes=0,
        num_decode_tokens=0,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=sum(LENS),
        has_initial_state=inputs.has_initial_state,
        non_spec_state_indices_tensor=inputs.state_indices,
    )
    context = SimpleNamespace(attn_metadata={"kda.0": metadata})
    monkeypatch.setattr(coalesced, "get_forward_context", lambda: context)
    raw = torch.randn(sum(LENS), WIDTH).to(torch.bfloat16)
    windows = torch.full((inputs.state_pool.shape[0], WIDTH, CELLS), 7.0, dtype=torch.bfloat16)
    with torch.no_grad():
        answer = layer._flashkda_prefill(
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            g=inputs.g,
            beta=inputs.beta,
            initial_state=gather(inputs.state_pool, inputs.state_indices, inputs.has_initial_state),
            cu_seqlens=inputs.cu_seqlens,
            out=out,
            checkpoint=checkpoint,
            raw_qkv=raw,
            conv_state=windows,
            recurrent_state=inputs.state_pool,
        )
    return answer, raw, windows


def planned(batch):
    targets = batch.targets
    return PlannedCheckpointMetadata(
        checkpoint_offsets=targets.offsets,
        state_indices=targets.slots,
        batch_rows=[0, 1],
        host_offsets=targets.offsets.tolist(),
        host_slots=targets.slots.tolist(),
        host_query_lens=list(LENS),
    )


@pytest.mark.parametrize("own_output", [True, False], ids=["into the output", "into the workspace"])
def test_a_planned_prefill_writes_every_state_and_window(layer, batch, monkeypatch, own_output):
    expected = make_batch(LENS, OFFSETS, heads=HEADS, gate=(-4.0, 1.0), resumed=(True, False))
    reference.ReferenceKDAPrefill().run(expected.inputs, expected.targets)
    out = batch.inputs.out if own_output else None
    (output, final), raw, windows = prefill(layer, batch, monkeypatch, planned(batch), out)

    torch.testing.assert_close(output, expected.out, rtol=0.02, atol=0.02)
    torch.testing.assert_close(batch.pool, expected.pool, rtol=1e-3, atol=1e-3)
    # Stock writes what is returned to the rows' own pages.
    assert torch.equal(final, batch.pool[batch.inputs.state_indices.long()])
    starts = batch.inputs.cu_seqlens.tolist()
    written = set()
    for row, slots in enumerate(batch.targets.slots.tolist()):
        for offset, slot in zip(batch.targets.offsets[row].tolist(), slots, strict=True):
            if slot:
                end = starts[row] + offset
                assert torch.equal(windows[slot, :, :3], raw[end - 3 : end].T)
                written.add(slot)
    assert len(written) == 5
    assert (windows[:, :, 3:] == 7.0).all(), "speculative cells are not the checkpoint's"
    assert all((windows[slot] == 7.0).all() for slot in set(range(len(windows))) - written)


def test_bad_metadata_stops_the_layer_before_anything_is_written(layer, batch, monkeypatch):
    checkpoint = planned(batch)
    checkpoint.host_offsets[0][1] = 47
    with pytest.raises(ValueError, match="checkpoint offset 47 is not a multiple of 16"):
        prefill(layer, batch, monkeypatch, checkpoint)
    assert torch.equal(batch.pool, batch.pool_before)


def test_a_prefill_without_plans_runs_stocks_call_or_the_chosen_kernel(layer, batch, monkeypatch):
    called = []

    def stock(self, *args):
        called.append(args)
        return "out", "final"

    monkeypatch.setattr(Glm5NextLinearAttention, "_flashkda_prefill", stock)
    answer, _, windows = prefill(layer, batch, monkeypatch, None)
    if isinstance(layer.kda_prefill, segmented.SegmentedKDAPrefill):
        assert answer == ("out", "final")
    else:
        expected = make_batch(LENS, None, heads=HEADS, gate=(-4.0, 1.0), resumed=(True, False))
        reference.ReferenceKDAPrefill().run(expected.inputs, None)
        torch.testing.assert_close(answer[0], expected.out, rtol=0.02, atol=0.02)
        assert not called
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
    ((raw, pool, _, targets, state_len),) = calls
    assert raw.shape[1] == pool.shape[1] == WIDTH
    assert (raw.stride(), state_len) == ((WIDTH + HEADS + 256, 1), 3)
    assert targets.offsets.shape == targets.slots.shape == (1, 4)
    assert moved == (["gather_states", "scatter_states"] if layer.kda_prefill.name != "reference" else [])
    assert (windows == 7.0).all()
    assert (states == 3.0).all()


def test_the_layer_asks_for_the_metadata_builder_that_takes_plans(layer):
    assert layer.get_attn_backend() is CheckpointedGDNBackend


def test_stock_sees_a_backend_name_it_knows_and_the_choice_is_kept():
    config: Any = SimpleNamespace(additional_config={"kda_prefill_backend": "native"})
    with coalesced._stock_backend(config):
        assert config.additional_config["kda_prefill_backend"] == "flashkda"
    assert backend_choice(config) == "native"
    config = SimpleNamespace(additional_config=None)
    with coalesced._stock_backend(config):
        assert backend_choice(config) == "auto"
