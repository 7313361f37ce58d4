# SPDX-License-Identifier: Apache-2.0
"""Providers as a GPU test builds them, and how far their results are from the fp64 reference."""

from __future__ import annotations

import dataclasses

import torch

from tests.kernels.mamba.conftest import Batch
from vllm.model_executor.layers.mamba.ops.kda_prefill import KDAPrefillInputs, select_kda_prefill
from vllm.model_executor.layers.mamba.ops.kda_prefill.base import KDAPrefill
from vllm.model_executor.layers.mamba.ops.kda_prefill.reference import ReferenceKDAPrefill

HEADS = 4


def build(name: str, tokens: int = 8192, rows: int = 16, heads: int = HEADS) -> KDAPrefill:
    op = select_kda_prefill(
        name,
        capability=torch.cuda.get_device_capability(),
        head_dim=128,
        dtype=torch.bfloat16,
        lower_bound=-5.0,
        max_num_tokens=tokens,
        max_num_seqs=rows,
        num_heads=heads,
    )
    assert op is not None
    return op


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    value, exact = value.double(), exact.double()
    return float((value - exact).norm() / exact.norm().clamp_min(1e-300))


def errors(op: KDAPrefill, batch: Batch, exact: KDAPrefillInputs) -> tuple[float, float]:
    """Relative errors of the output and of the worst state of `batch` after `op` ran on a copy."""
    inputs = dataclasses.replace(
        batch.inputs, state_pool=batch.pool_before.clone(), out=torch.full_like(batch.out, float("nan"))
    )
    op.run(inputs, batch.checkpoints)
    assert torch.equal(inputs.state_pool[0], batch.pool_before[0])
    assert torch.equal(inputs.state_pool[-1], batch.pool_before[-1])
    states = [
        relative_error(inputs.state_pool[i], exact.state_pool[i]) for i in range(1, batch.pool_before.shape[0] - 1)
    ]
    return relative_error(inputs.out, exact.out), max(states)


def reference(batch: Batch) -> KDAPrefillInputs:
    """Inputs whose output (fp64 rounded to bf16) and pool hold the exact results."""
    inputs = dataclasses.replace(batch.inputs, state_pool=batch.pool_before.clone(), out=torch.empty_like(batch.out))
    ReferenceKDAPrefill().run(inputs, batch.checkpoints)
    return inputs
