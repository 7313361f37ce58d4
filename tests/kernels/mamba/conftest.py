# SPDX-License-Identifier: Apache-2.0
"""Random KDA prefill batches, shared by the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from vllm.model_executor.layers.mamba.ops.kda_prefill import Checkpoints, KDAPrefillInputs


@dataclass
class Batch:
    """Inputs, checkpoints and the pool as it was before the run."""

    inputs: KDAPrefillInputs
    checkpoints: Checkpoints | None
    pool_before: torch.Tensor

    @property
    def out(self) -> torch.Tensor:
        return self.inputs.out

    @property
    def pool(self) -> torch.Tensor:
        return self.inputs.state_pool


def make_batch(
    query_lens: Sequence[int],
    offsets: Sequence[Sequence[int]] | None = None,
    *,
    heads: int = 2,
    device: str = "cpu",
    seed: int = 0,
    resumed: bool | Sequence[bool] = True,
    gate: tuple[float, float] = (0.0, 1.0),
    beta: tuple[float, float] = (0.0, 1.0),
    norm: float = 1.0,
    value_scale: float = 1.0,
    state_padding: int = 64,
    spare_tokens: int = 0,
) -> Batch:
    """A packed batch with Gaussian inputs; `gate` and `beta` are mean and deviation of the logits.

    Row `i` runs on state `i + 1`; checkpoints take the states behind those in order. Outputs and unused
    states are poisoned with NaN and a pattern, so that an element nobody wrote shows.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, tokens = len(query_lens), sum(query_lens) + spare_tokens

    def gauss(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    shape = (1, tokens, heads, 128)
    bf16 = torch.bfloat16
    offsets = offsets if offsets is not None else [[] for _ in query_lens]
    count = sum(1 for row in offsets for offset in row if offset)
    indices: list[list[int]] = []
    next_index = rows + 1
    for row in offsets:
        indices.append([])
        for offset in row:
            indices[-1].append(next_index if offset else 0)
            next_index += bool(offset)
    state_count = rows + count + 2
    size = heads * 128 * 128 + state_padding
    # A stream of its own: the activations must not depend on the number of checkpoints.
    states = torch.Generator().manual_seed(seed + 1)
    storage = torch.stack([0.3 * torch.randn(size, generator=states) for _ in range(state_count)])
    pool = storage.to(device)[:, : heads * 128 * 128].unflatten(1, (heads, 128, 128))
    flags = [resumed] * rows if isinstance(resumed, bool) else list(resumed)
    bounds = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    # Rows of beta are strided, as a slice of a fused projection is.
    wide_beta = (beta[0] + beta[1] * gauss(1, tokens, heads + 3)).to(bf16).to(device)
    inputs = KDAPrefillInputs(
        q=(norm * gauss(*shape)).to(bf16).to(device),
        k=(norm * gauss(*shape)).to(bf16).to(device),
        v=(value_scale * gauss(*shape)).to(bf16).to(device),
        g=(gate[0] + gate[1] * gauss(*shape)).to(bf16).to(device),
        beta=wide_beta[..., :heads],
        A_log=(0.5 * gauss(heads)).to(device),
        dt_bias=(0.5 * gauss(heads, 128)).to(device),
        scale=128**-0.5,
        lower_bound=-5.0,
        cu_seqlens=bounds.to(device),
        state_pool=pool,
        state_indices=torch.arange(1, rows + 1, dtype=torch.int32, device=device),
        has_initial_state=torch.tensor(flags, dtype=torch.bool, device=device),
        out=torch.full(shape, float("nan"), dtype=bf16, device=device),
    )
    checkpoints = Checkpoints.from_host(offsets, indices, list(query_lens), device) if count else None
    return Batch(inputs, checkpoints, pool.clone())


@pytest.fixture
def batch_factory() -> Callable[..., Batch]:
    return make_batch


@pytest.fixture(scope="session")
def flashkda() -> None:
    """Stock vLLM's FlashKDA extension, or the library `FLASHKDA_LIBRARY` names; else skip."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    library = os.environ.get("FLASHKDA_LIBRARY")
    if library:
        torch.ops.load_library(library)
        return
    pytest.importorskip("vllm._flashkda_C")


@pytest.fixture(params=["flashkda", "native"])
def gpu_provider(request: pytest.FixtureRequest) -> str:
    """Name of a provider that runs on a GPU; skips where FlashKDA is not there."""
    if request.param == "flashkda":
        request.getfixturevalue("flashkda")
    return str(request.param)
