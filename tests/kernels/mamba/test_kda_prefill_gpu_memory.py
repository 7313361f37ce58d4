# SPDX-License-Identifier: Apache-2.0
"""What a provider reads and writes on a GPU: strided inputs, its own states and no others, and inside a CUDA graph."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.kernels.mamba.gpu_providers import HEADS, build, reference, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_strided_metadata_is_understood(gpu_provider, batch_factory):
    """State indices may be a column of a block table, checkpoint tables a part of a wider one."""
    batch = batch_factory([100, 64], [[32, 64], [16]], heads=HEADS, device="cuda")
    op = build(gpu_provider)
    op.run(batch.inputs, batch.checkpoints)

    def column(tensor):
        return torch.stack([tensor, torch.zeros_like(tensor)], -1)[..., 0]

    checkpoints = dataclasses.replace(
        batch.checkpoints,
        checkpoint_offsets=column(batch.checkpoints.checkpoint_offsets),
        state_indices=column(batch.checkpoints.state_indices),
    )
    inputs = dataclasses.replace(
        batch.inputs,
        state_indices=column(batch.inputs.state_indices),
        has_initial_state=column(batch.inputs.has_initial_state),
        state_pool=batch.pool_before.clone(),
        out=torch.empty_like(batch.out),
    )
    assert not inputs.state_indices.is_contiguous()
    op.run(inputs, checkpoints)
    assert torch.equal(inputs.out, batch.out)
    assert torch.equal(inputs.state_pool, batch.pool)


def test_strided_activations_are_read_in_place(batch_factory):
    batch = batch_factory([300], [[64, 128]], heads=HEADS, device="cuda")
    x = batch.inputs
    fused = torch.cat([x.q.flatten(2), x.k.flatten(2), x.v.flatten(2)], -1)
    q, k, v = (part.unflatten(-1, (HEADS, 128)) for part in fused.chunk(3, -1))
    assert not q.is_contiguous()
    op = build("native")
    op.run(batch.inputs, batch.checkpoints)
    strided = dataclasses.replace(x, q=q, k=k, v=v, state_pool=batch.pool_before.clone(), out=torch.empty_like(x.out))
    op.run(strided, batch.checkpoints)
    assert torch.equal(strided.out, batch.out)
    assert torch.equal(strided.state_pool, batch.pool)


def test_states_past_two_to_the_31_elements(gpu_provider, batch_factory):
    """The last state starts more than 2^31 elements (8 GiB) into the pool."""
    batch = batch_factory([96], [[32, 64]], heads=1, device="cuda")
    exact = reference(batch)
    stride = 2**31 // 5 // 64 * 64 + 64
    storage = torch.zeros(7, stride, device="cuda")
    pool = storage[:, : 128 * 128].view(7, 1, 128, 128)
    pool[:5] = batch.pool_before
    pool[6] = batch.pool_before[1]
    state_indices = torch.tensor([[6 - 1, 2, 0, 0]], dtype=torch.int32, device="cuda")
    checkpoints = dataclasses.replace(batch.checkpoints, state_indices=state_indices, host_state_indices=[[5, 2]])
    inputs = dataclasses.replace(
        batch.inputs,
        state_pool=pool,
        state_indices=torch.tensor([6], dtype=torch.int32, device="cuda"),
        out=torch.empty_like(batch.out),
    )
    build(gpu_provider, heads=1).run(inputs, checkpoints)
    assert relative_error(inputs.out, exact.out) < 1e-2
    for index, source in ((6, 1), (5, 2), (2, 3)):
        assert relative_error(pool[index], exact.state_pool[source]) < 1e-2
    pool[[2, 5, 6]] = 0
    storage[:5, : 128 * 128][[0, 1, 3, 4]] = 0
    assert not storage.any()


def test_device_never_writes_outside_the_pool(gpu_provider, batch_factory):
    """State indices the host could not see (no host copy) at or below 0 or past the pool are skipped."""
    batch = batch_factory([96], [[16, 32, 48, 64]], heads=HEADS, device="cuda")
    guarded = torch.zeros(12, HEADS, 128, 128, device="cuda")
    pool = guarded[4:8]
    pool.copy_(batch.pool_before[:4])
    state_indices = torch.tensor([[-1, 4, 0, 3]], dtype=torch.int32, device="cuda")
    checkpoints = dataclasses.replace(batch.checkpoints, state_indices=state_indices, host_state_indices=None)
    inputs = dataclasses.replace(batch.inputs, state_pool=pool)
    build(gpu_provider).run(inputs, checkpoints)
    assert not guarded[:4].any()
    assert not guarded[8:].any()
    assert torch.equal(pool[0], batch.pool_before[0])
    exact = reference(batch)
    assert relative_error(pool[3], exact.state_pool[5]) < 1e-2


def test_bad_metadata_leaves_the_pool_bit_identical(gpu_provider, batch_factory):
    batch = batch_factory([96], [[16, 32]], heads=HEADS, device="cuda")
    op = build(gpu_provider)
    for offsets, state_indices in (([[16, 96]], [[2, 3]]), ([[16, 40]], [[2, 3]]), ([[16, 32]], [[2, 2]])):
        bad = dataclasses.replace(batch.checkpoints, host_offsets=offsets, host_state_indices=state_indices)
        with pytest.raises(ValueError, match="row 0"):
            op.run(batch.inputs, bad)
    torch.cuda.synchronize()
    assert torch.equal(batch.pool, batch.pool_before)
    assert batch.out.isnan().all()


def test_native_replays_in_a_graph_with_another_plan(batch_factory):
    op = build("native")
    captured = batch_factory([300, 84], [[64, 128, 256], [16]], heads=HEADS, device="cuda")
    workspace = tuple(torch.empty(s, dtype=d, device="cuda") for s, d in op.workspace_specs())
    op.run(captured.inputs, captured.checkpoints, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.run(captured.inputs, captured.checkpoints, workspace)

    live = batch_factory([150, 234], [[32], [16, 96, 224]], heads=HEADS, device="cuda", seed=7)
    for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "has_initial_state"):
        getattr(captured.inputs, name).copy_(getattr(live.inputs, name))
    captured.checkpoints.checkpoint_offsets.copy_(live.checkpoints.checkpoint_offsets)
    captured.checkpoints.state_indices.copy_(live.checkpoints.state_indices)
    captured.pool.copy_(live.pool_before)
    graph.replay()
    op.run(live.inputs, live.checkpoints, workspace)
    assert torch.equal(captured.out, live.out)
    assert torch.equal(captured.pool, live.pool)
