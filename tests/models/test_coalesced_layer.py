# SPDX-License-Identifier: Apache-2.0
"""What a KDA layer runs for a prefill: the op on the batch's own states, the convolution history, stock's kernel."""

from dataclasses import replace
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
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.gdn_checkpoint import CheckpointedGDNBackend, PlannedCheckpointMetadata

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


class Step:
    """One step through stock's own `_forward`, whose kernels other than the prefill are stubs.

    Args:
        layer: The layer under test.
        batch: The prefill rows.
        monkeypatch: Puts the stubs in place.
        verify_tokens: Tokens of a draft-verify row that lie between the two prefill rows.
    """

    def __init__(self, layer, batch, monkeypatch, verify_tokens=0):
        self.layer, self.batch, self.verify_tokens = layer, batch, verify_tokens
        self.places = [i + (verify_tokens if i >= LENS[0] else 0) for i in range(TOKENS)]
        give_parameters(layer, batch.inputs)
        layer._conv_state_dim_first, layer.kda_safe_gate, layer.kda_prefill_backend = True, True, "flashkda"
        layer.local_num_heads, layer.local_projection_size = HEADS, HEADS * 128
        layer._merged_conv_weight, layer.q_conv1d = torch.empty(0), SimpleNamespace(bias=None)
        layer.kv_cache = (windows_of(batch), batch.pool)
        names = coalesced.CoalescedLinearAttention._forward.__wrapped__.__globals__
        for name, stub in (
            ("get_forward_context", lambda: SimpleNamespace(attn_metadata={"kda.0": self.metadata})),
            ("causal_conv1d_fn", lambda x, *_, **__: x),
            ("causal_conv1d_update", lambda x, *_, **__: x),
            ("fused_recurrent_kda", lambda q, **_: (torch.full_like(q, 5.0), None)),
        ):
            assert name in names
            monkeypatch.setitem(names, name, stub)

    def run(self, checkpoint):
        """The layer's output, `[tokens, H, 128]`."""
        inputs = self.batch.inputs
        spec = list(range(LENS[0], LENS[0] + self.verify_tokens))
        self.metadata = GDNAttentionMetadata(
            num_prefills=2,
            num_prefill_tokens=TOKENS,
            num_decodes=0,
            num_decode_tokens=0,
            num_spec_decodes=int(bool(spec)),
            num_spec_decode_tokens=len(spec),
            num_actual_tokens=TOKENS + len(spec),
            has_initial_state=inputs.has_initial_state,
            non_spec_query_start_loc=inputs.cu_seqlens,
            non_spec_state_indices_tensor=inputs.state_indices,
            spec_sequence_masks=torch.tensor([False, True, False]) if spec else None,
            spec_query_start_loc=torch.tensor([0, len(spec)], dtype=torch.int32),
            spec_state_indices_tensor=torch.zeros(1, len(spec), dtype=torch.int32),
            spec_token_indx=torch.tensor(spec, dtype=torch.int64),
            non_spec_token_indx=torch.tensor(self.places) if spec else None,
            num_accepted_tokens=torch.ones(1, dtype=torch.int32),
        )
        self.metadata.checkpoint = checkpoint
        out = torch.full((1, self.metadata.num_actual_tokens, HEADS, 128), float("nan"), dtype=torch.bfloat16)
        qkv = torch.cat([t.flatten(2) for t in (inputs.q, inputs.k, inputs.v)], -1)[0]
        with torch.no_grad():
            self.layer._forward(
                qkv_proj_states=self._spread(qkv, 0),
                g1=self._spread(inputs.g, 1),
                beta=self._spread(inputs.beta, 1),
                core_attn_out=out,
            )
        return out[0]

    def _spread(self, tensor, axis):
        """The prefill rows' tokens at their places in the batch, and ones where tokens are verified."""
        shape = list(tensor.shape)
        shape[axis] += self.verify_tokens
        return torch.ones(shape, dtype=tensor.dtype).index_copy(axis, torch.tensor(self.places), tensor)


@pytest.mark.parametrize("verify_tokens", [0, 4], ids=["prefill alone", "among draft-verify rows"])
@pytest.mark.parametrize("exports", [True, False], ids=["with checkpoints", "without"])
def test_stocks_forward_copies_states_only_where_needed(layer, copies, monkeypatch, verify_tokens, exports):
    batch, expected = (new_batch(OFFSETS if exports else None) for _ in range(2))
    reference.ReferenceKDAPrefill().run(expected.inputs, expected.checkpoints)

    def stock(self, q, k, v, g, beta, initial_state, cu_seqlens, out):
        """Stock's kernel: dense states in, dense states out."""
        out = torch.empty_like(q) if out is None else out
        pool = torch.cat([torch.zeros_like(initial_state[:1]), initial_state])
        inputs = replace(batch.inputs, q=q, k=k, v=v, g=g, beta=beta, state_pool=pool, out=out)
        inputs = replace(
            inputs,
            state_indices=torch.tensor([1, 2], dtype=torch.int32),
            has_initial_state=torch.tensor([True, True]),
        )
        reference.ReferenceKDAPrefill().run(inputs)
        return out, pool[1:]

    monkeypatch.setattr(Glm5NextLinearAttention, "_flashkda_prefill", stock)
    step = Step(layer, batch, monkeypatch, verify_tokens)
    out = step.run(planned(batch) if exports else None)
    torch.testing.assert_close(out[step.places], expected.out[0], rtol=0.02, atol=0.02)
    assert (out[LENS[0] : LENS[0] + verify_tokens] == 5.0).all()
    torch.testing.assert_close(batch.pool, expected.pool, rtol=1e-3, atol=1e-3)
    leaves_it_to_stock = layer.kda_prefill.defers_to_stock and not exports
    assert copies == (["gather", "scatter"] if leaves_it_to_stock else [])


def test_stocks_own_forward_keeps_its_copies():
    stock: Any = Glm5NextLinearAttention._forward
    names = stock.__wrapped__.__globals__
    assert names["gather_initial_states"] is coalesced.gather_initial_states
    assert names["scatter_states"] is coalesced.scatter_states


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
