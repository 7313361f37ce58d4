# SPDX-License-Identifier: Apache-2.0
"""The b12x launcher against a stub of the package that runs the reference over its pool.

The package itself needs an SM12x GPU; what is pinned here is how its arguments are filled.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.model_executor.layers.mamba.ops.kda_prefill import Checkpoints, KDAPrefillInputs
from vllm.model_executor.layers.mamba.ops.kda_prefill.b12x import B12xLauncher
from vllm.model_executor.layers.mamba.ops.kda_prefill.reference import ReferenceKDAPrefill
from vllm.model_executor.layers.mamba.ops.kda_prefill.segmented import SegmentedKDAPrefill


class FakePackage:
    """The part of `b12x.sequence.kda_prefill` that the launcher calls."""

    def __init__(self, supported: bool = True) -> None:
        self.supported = supported
        self.caps: dict[str, Any] = {}

    def is_supported(self) -> bool:
        return self.supported

    def Caps(self, **caps: Any) -> dict[str, Any]:
        self.caps = caps
        return caps

    def invocation_from_tensors(self, **tensors: torch.Tensor) -> dict[str, torch.dtype]:
        return {name: tensor.dtype for name, tensor in tensors.items()}

    def plan(self, caps: dict[str, Any], *, invocation: dict[str, torch.dtype]) -> Any:
        assert invocation["A_log"] == torch.float32
        scratch = SimpleNamespace(shape=(64,), dtype=torch.uint8)
        return SimpleNamespace(memory_requirements=lambda: SimpleNamespace(scratch=(scratch,)))

    def bind(self, plan: Any, **arguments: Any) -> Any:
        assert arguments["scratch"].shape == (64,)
        assert arguments["recurrent_state"].shape[0] == self.caps["max_state_slots"]
        return SimpleNamespace(**arguments)

    def run(self, x: Any, *, lower_bound: float, scale: float, max_live_tokens: int, max_live_seqs: int) -> None:
        assert (max_live_tokens, max_live_seqs) == (int(x.num_tokens), int(x.num_seqs))
        rows = max_live_seqs
        pool = torch.cat([x.recurrent_state, torch.zeros(rows, *x.recurrent_state.shape[1:])])
        scratch = torch.arange(pool.shape[0] - rows, pool.shape[0], dtype=torch.int32)
        pool[scratch] = pool[x.initial_state_indices]
        offsets = torch.zeros(rows, 4, dtype=torch.int32)
        indices = torch.zeros_like(offsets)
        offsets[:, 0], indices[:, 0] = x.checkpoint_offsets, x.checkpoint_state_indices
        inputs = KDAPrefillInputs(
            q=x.q[None],
            k=x.k[None],
            v=x.v[None],
            g=x.raw_g[None],
            beta=x.raw_beta[None],
            A_log=x.A_log,
            dt_bias=x.dt_bias,
            scale=scale,
            lower_bound=lower_bound,
            cu_seqlens=x.cu_seqlens,
            state_pool=pool,
            state_indices=scratch,
            has_initial_state=torch.ones(rows, dtype=torch.bool),
            out=x.output[None],
        )
        lens = x.cu_seqlens.diff().tolist()
        checkpoints = Checkpoints(offsets, indices, offsets.tolist(), lens, indices.tolist())
        ReferenceKDAPrefill().run(inputs, checkpoints)
        x.recurrent_state.copy_(pool[: x.recurrent_state.shape[0]])
        x.recurrent_state[x.final_state_indices] = pool[scratch]


def test_segments_over_the_package_match_the_reference(batch_factory):
    lens, offsets = [20, 70, 5], [[16], [16, 32, 48, 64], []]
    launcher = B12xLauncher(num_heads=2, max_num_tokens=256, max_num_seqs=4, device="cpu", op=FakePackage())
    op = SegmentedKDAPrefill(launcher, num_heads=2, max_num_tokens=256, max_num_seqs=4)
    batch = batch_factory(lens, offsets)
    op.run(batch.inputs, batch.checkpoints)
    exact = batch_factory(lens, offsets)
    ReferenceKDAPrefill().run(exact.inputs, exact.checkpoints)
    torch.testing.assert_close(batch.out, exact.out, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(batch.pool, exact.pool, rtol=1e-5, atol=1e-6)


def test_an_unsupported_gpu_is_refused():
    with pytest.raises(RuntimeError, match="does not support this GPU"):
        B12xLauncher(num_heads=2, max_num_tokens=64, max_num_seqs=1, device="cpu", op=FakePackage(False))
