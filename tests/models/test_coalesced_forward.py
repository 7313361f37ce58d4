# SPDX-License-Identifier: Apache-2.0
"""Stock's own forward over this layer: it copies states out of and into the pool only where its kernel runs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.models.conftest import HEADS, LENS, OFFSETS, TOKENS, give_parameters, new_batch, planned, windows_of
from vllm.model_executor.layers.mamba.ops.kda_prefill import reference
from vllm.models.glm5next import coalesced
from vllm.models.glm5next.common.kda import Glm5NextLinearAttention
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata


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
