# SPDX-License-Identifier: Apache-2.0
"""Export of the convolution history at checkpoints."""

from __future__ import annotations

import pytest
import torch

from vllm.model_executor.layers.mamba.ops.kda_prefill import Checkpoints, export_conv_history

KERNEL_WIDTH, NUM_SPEC, WIDTH = 4, 3, 3 * 2 * 128
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _pool(layout: str, states: int, device: str) -> torch.Tensor:
    """`[states, dim, cells]` view of a padded pool in one of vLLM's two layouts."""
    cells = KERNEL_WIDTH - 1 + NUM_SPEC
    padded = torch.randn(states, WIDTH * cells + 40, dtype=torch.float32).to(torch.bfloat16).to(device)
    body = padded[:, : WIDTH * cells]
    if layout == "DS":
        return body.unflatten(1, (WIDTH, cells))
    return body.unflatten(1, (cells, WIDTH)).transpose(-1, -2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_kda_checkpoint_history_excludes_speculative_cells(layout, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(0)
    lens = [64, 1, 100, 40]
    offsets = [[16, 48], [], [96, 0, 32, 64], [32]]
    indices = [[5, 2], [], [9, 0, 1, 7], [3]]
    starts = torch.tensor([0, *lens]).cumsum(0).tolist()
    tokens = starts[-1]
    # Rows of the raw projection are wider than the convolution's input.
    raw = torch.randn(tokens, WIDTH + 200).to(torch.bfloat16).to(device)[:, :WIDTH]
    pool = _pool(layout, 11, device)
    before = pool.clone()
    export_conv_history(
        raw,
        pool,
        torch.tensor(starts, dtype=torch.int32, device=device),
        Checkpoints.from_host(offsets, indices, lens, device),
        KERNEL_WIDTH - 1,
    )
    expected = before.clone()
    for row, (row_offsets, row_indices) in enumerate(zip(offsets, indices, strict=True)):
        for offset, index in zip(row_offsets, row_indices, strict=True):
            for cell in range(KERNEL_WIDTH - 1) if index else ():
                token = starts[row] + offset - (KERNEL_WIDTH - 1) + cell
                expected[index, :, cell] = raw[token]
    assert torch.equal(pool, expected)
    assert not torch.equal(pool[5, :, : KERNEL_WIDTH - 1], before[5, :, : KERNEL_WIDTH - 1])
    assert torch.equal(pool[..., KERNEL_WIDTH - 1 :], before[..., KERNEL_WIDTH - 1 :])


@pytest.mark.parametrize("device", DEVICES)
def test_indices_outside_the_pool_are_never_written(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    raw = torch.randn(64, WIDTH).to(torch.bfloat16).to(device)
    storage = torch.zeros(8, WIDTH, KERNEL_WIDTH - 1, dtype=torch.bfloat16, device=device)
    pool = storage[2:6]
    checkpoints = Checkpoints.from_host([[16, 32, 48]], [[-1, 4, 5]], [64], device)
    bounds = torch.tensor([0, 64], dtype=torch.int32, device=device)
    export_conv_history(raw, pool, bounds, checkpoints, KERNEL_WIDTH - 1)
    assert not storage.any()


def test_mismatched_width_is_refused():
    checkpoints = Checkpoints.from_host([[16]], [[1]], [64], "cpu")
    with pytest.raises(ValueError, match="does not hold rows"):
        export_conv_history(
            torch.zeros(64, 8), torch.zeros(4, 9, 3), torch.tensor([0, 64]), checkpoints, KERNEL_WIDTH - 1
        )
