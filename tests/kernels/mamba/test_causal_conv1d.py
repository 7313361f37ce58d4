"""Export of the convolution history at checkpoints."""

from __future__ import annotations

import pytest
import torch

from vllm.model_executor.layers.mamba.ops.kda_prefill import CheckpointTargets, export_conv_history

KERNEL_WIDTH, NUM_SPEC, WIDTH = 4, 3, 3 * 2 * 128
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _pool(layout: str, slots: int, device: str) -> torch.Tensor:
    """``[slots, dim, cells]`` view of a padded page pool in one of vLLM's two layouts."""
    cells = KERNEL_WIDTH - 1 + NUM_SPEC
    page = torch.randn(slots, WIDTH * cells + 40, dtype=torch.float32).to(torch.bfloat16).to(device)
    body = page[:, : WIDTH * cells]
    if layout == "DS":
        return body.unflatten(1, (WIDTH, cells))
    return body.unflatten(1, (cells, WIDTH)).transpose(-1, -2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("scattered", [False, True])
def test_kda_checkpoint_history_excludes_speculative_cells(layout, scattered, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(0)
    lens = [64, 1, 100, 40]
    offsets = [[16, 48], [], [96, 0, 32, 64], [32]]
    slots = [[5, 2], [], [9, 0, 1, 7], [3]]
    starts = torch.tensor([0, *lens]).cumsum(0).tolist()
    tokens = starts[-1]
    # Rows of the raw projection are wider than the convolution's input and, when scattered, are mixed
    # with the tokens of draft verification.
    total = tokens + 24 if scattered else tokens
    raw = torch.randn(total, WIDTH + 200).to(torch.bfloat16).to(device)[:, :WIDTH]
    token_map = torch.randperm(total)[:tokens].sort().values if scattered else None
    pool = _pool(layout, 11, device)
    before = pool.clone()
    export_conv_history(
        raw,
        pool,
        torch.tensor(starts, dtype=torch.int32, device=device),
        CheckpointTargets.from_host(offsets, slots, lens, device),
        KERNEL_WIDTH - 1,
        None if token_map is None else token_map.to(device),
    )
    expected = before.clone()
    for row, (row_offsets, row_slots) in enumerate(zip(offsets, slots, strict=True)):
        for offset, slot in zip(row_offsets, row_slots, strict=True):
            for cell in range(KERNEL_WIDTH - 1) if slot else ():
                token = starts[row] + offset - (KERNEL_WIDTH - 1) + cell
                source = token if token_map is None else int(token_map[token])
                expected[slot, :, cell] = raw[source]
    assert torch.equal(pool, expected)
    assert not torch.equal(pool[5, :, : KERNEL_WIDTH - 1], before[5, :, : KERNEL_WIDTH - 1])
    assert torch.equal(pool[..., KERNEL_WIDTH - 1 :], before[..., KERNEL_WIDTH - 1 :])


@pytest.mark.parametrize("device", DEVICES)
def test_slots_outside_the_pool_are_never_written(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    raw = torch.randn(64, WIDTH).to(torch.bfloat16).to(device)
    storage = torch.zeros(8, WIDTH, KERNEL_WIDTH - 1, dtype=torch.bfloat16, device=device)
    pool = storage[2:6]
    targets = CheckpointTargets.from_host([[16, 32, 48]], [[-1, 4, 5]], [64], device)
    bounds = torch.tensor([0, 64], dtype=torch.int32, device=device)
    export_conv_history(raw, pool, bounds, targets, KERNEL_WIDTH - 1)
    assert not storage.any()


def test_mismatched_width_is_refused():
    targets = CheckpointTargets.from_host([[16]], [[1]], [64], "cpu")
    with pytest.raises(ValueError, match="does not hold rows"):
        export_conv_history(torch.zeros(64, 8), torch.zeros(4, 9, 3), torch.tensor([0, 64]), targets, KERNEL_WIDTH - 1)
