# SPDX-License-Identifier: Apache-2.0
"""Properties every KDA prefill provider keeps; on the CPU over the reference kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.kernels.mamba.reference_launcher import segmented
from vllm.model_executor.layers.mamba.ops.kda_prefill import checkpoints as checkpoints_module
from vllm.model_executor.layers.mamba.ops.kda_prefill.base import KDAPrefill
from vllm.model_executor.layers.mamba.ops.kda_prefill.reference import ReferenceKDAPrefill

PROVIDERS: dict[str, Any] = {"reference": ReferenceKDAPrefill, "segmented": segmented}


@pytest.fixture(params=PROVIDERS)
def provider(request) -> KDAPrefill:
    return PROVIDERS[request.param]()


def test_one_token_follows_the_delta_rule(batch_factory):
    batch = batch_factory([1], heads=1)
    ReferenceKDAPrefill().run(batch.inputs)
    x = batch.inputs
    k = x.k[0, 0, 0].double()
    k = k / (k.square().sum() + 1e-6).sqrt()
    q = x.q[0, 0, 0].double()
    q = q / (q.square().sum() + 1e-6).sqrt()
    decay = torch.exp(-5 / (1 + torch.exp(-x.A_log[0].double().exp() * (x.g[0, 0, 0] + x.dt_bias[0]).double())))
    beta = 1 / (1 + torch.exp(-x.beta[0, 0, 0].double()))
    state = batch.pool_before[1, 0].double() * decay
    state = state + beta * torch.outer(x.v[0, 0, 0].double() - state @ k, k)
    torch.testing.assert_close(batch.pool[1, 0].double(), state, rtol=1e-6, atol=1e-6)
    out = (128**-0.5 * state @ q).to(torch.bfloat16)
    torch.testing.assert_close(batch.out[0, 0, 0], out, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize(
    "lens,offsets",
    [
        ([70], [[16, 32, 48, 64]]),
        ([70], [[64, 16]]),
        ([20, 70], [[], [16, 32, 64]]),
        ([70, 20, 1], [[16, 32, 64], [16], []]),
        ([40, 70, 33], [[32, 16], [16, 0, 64, 32], [16]]),
    ],
)
def test_exported_states_equal_states_of_shorter_prompts(provider, batch_factory, lens, offsets):
    batch = batch_factory(lens, offsets, resumed=[i % 2 == 0 for i in range(len(lens))])
    provider.run(batch.inputs, batch.checkpoints)
    assert not batch.out.isnan().any()
    whole = batch_factory(lens, resumed=[i % 2 == 0 for i in range(len(lens))])
    ReferenceKDAPrefill().run(whole.inputs)
    torch.testing.assert_close(batch.out, whole.out, rtol=1e-2, atol=1e-3)
    rows = len(lens)
    torch.testing.assert_close(batch.pool[1 : rows + 1], whole.pool[1 : rows + 1], rtol=1e-5, atol=1e-6)
    index = rows + 1
    for row, row_offsets in enumerate(offsets):
        states = _states_of_shorter_prompts(batch, row, sum(lens[:row]), sorted(filter(None, row_offsets)))
        for offset in filter(None, row_offsets):
            torch.testing.assert_close(batch.pool[index], states[offset], rtol=1e-5, atol=1e-6)
            index += 1
    # The null state and the one nobody names keep their bits.
    assert torch.equal(batch.pool[0], batch.pool_before[0])
    assert torch.equal(batch.pool[-1], batch.pool_before[-1])


def _states_of_shorter_prompts(batch, row: int, begin: int, offsets: list[int]) -> dict[int, torch.Tensor]:
    """Final states of prompts that end at `offsets`, each continuing the one before it."""
    x, pool, states, done = batch.inputs, batch.pool_before.clone(), {}, 0
    present = x.has_initial_state[row : row + 1]
    for offset in offsets:
        part = slice(begin + done, begin + offset)
        inputs = dataclasses.replace(
            x,
            q=x.q[:, part],
            k=x.k[:, part],
            v=x.v[:, part],
            g=x.g[:, part],
            beta=x.beta[:, part],
            out=torch.empty_like(x.out[:, part]),
            cu_seqlens=torch.tensor([0, offset - done], dtype=torch.int32),
            state_pool=pool,
            state_indices=x.state_indices[row : row + 1],
            has_initial_state=present,
        )
        ReferenceKDAPrefill().run(inputs)
        present = torch.tensor([True])
        states[offset] = pool[row + 1].clone()
        done = offset
    return states


def test_rows_on_the_null_block_write_nothing(provider, batch_factory):
    batch = batch_factory([20, 40], [[], [16]])
    inputs = dataclasses.replace(batch.inputs, state_indices=torch.tensor([0, -1], dtype=torch.int32))
    provider.run(inputs, batch.checkpoints)
    changed = [i for i in range(5) if not torch.equal(batch.pool[i], batch.pool_before[i])]
    assert changed == [3]


@pytest.mark.parametrize(
    "offsets,indices,message",
    [
        ([[96], []], [[3], []], "row 0: checkpoint offset 96 is not inside the row of 96 tokens"),
        ([[], [112]], [[], [3]], "row 1: checkpoint offset 112 is not inside the row of 64 tokens"),
        ([[-16], []], [[3], []], "row 0: checkpoint offset -16 is not inside the row of 96 tokens"),
        ([[24], []], [[3], []], "row 0: checkpoint offset 24 is not a multiple of 16 tokens"),
        ([[16.0], []], [[3], []], "row 0: checkpoint offset 16.0 is not an integer"),
        ([[True], []], [[3], []], "row 0: checkpoint offset True is not an integer"),
        ([[16, 16], []], [[3, 4], []], "row 0: checkpoint offset 16 is given twice"),
        ([[16], [32]], [[3], [3]], "row 1: checkpoint state index 3 is already taken by row 0"),
        ([[16], []], [[6], []], "row 0: checkpoint state index 6 is outside the pool of 6 states"),
        ([[16], []], [[-1], []], "row 0: checkpoint state index -1 is outside the pool of 6 states"),
        ([[16], []], [[0], []], "row 0: checkpoint offset 16 with state index 0; both must be set or both 0"),
        ([[0], []], [[4], []], "row 0: checkpoint offset 0 with state index 4; both must be set or both 0"),
        ([[16, 32], []], [[3], []], "row 0: 1 checkpoint state indices for 2 checkpoint offsets"),
        ([[16, 32, 48, 64, 80], []], [[3, 4, 5, 6, 7], []], "row 0: 5 checkpoints; at most 4"),
        ([[16]], [[3]], "does not cover 2 rows"),
    ],
)
def test_bad_metadata_raises_and_leaves_everything_untouched(provider, batch_factory, offsets, indices, message):
    batch = batch_factory([96, 64], [[16], [32]])
    bad = dataclasses.replace(batch.checkpoints, host_offsets=offsets, host_state_indices=indices)
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        provider.run(batch.inputs, bad)
    assert torch.equal(batch.pool, batch.pool_before)
    assert batch.out.isnan().all()


def test_checkpoints_are_read_once_for_each_batch_shape(batch_factory, monkeypatch):
    """All layers of a step share one metadata object; a batch of another shape, or wrong metadata, is read anew."""
    provider, read = ReferenceKDAPrefill(), []
    check = checkpoints_module._check_offsets

    def check_and_note(row, *values):
        read.append(row)
        check(row, *values)

    monkeypatch.setattr(checkpoints_module, "_check_offsets", check_and_note)
    batch = batch_factory([96, 64], [[16], [32]])
    for _ in range(3):
        provider.run(batch.inputs, batch.checkpoints)
    assert read == [0, 1]
    larger = dataclasses.replace(batch.inputs, state_pool=torch.cat([batch.pool, batch.pool]))
    provider.run(larger, batch.checkpoints)
    assert read == [0, 1] * 2
    smaller = dataclasses.replace(batch.inputs, state_pool=batch.pool[:4])
    for _ in range(2):
        with pytest.raises(ValueError, match="outside the pool of 4 states"):
            provider.run(smaller, batch.checkpoints)
    provider.run(batch.inputs, dataclasses.replace(batch.checkpoints))
    assert read == [0, 1] * 5


@pytest.mark.parametrize("field", ["q", "g", "beta", "A_log", "dt_bias", "state_pool", "cu_seqlens", "out"])
def test_wrong_dtype_is_named(provider, batch_factory, field):
    batch = batch_factory([32])
    wrong = dataclasses.replace(batch.inputs, **{field: getattr(batch.inputs, field).to(torch.float16)})
    with pytest.raises(ValueError, match=field):
        provider.run(wrong)
