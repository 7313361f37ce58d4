# SPDX-License-Identifier: Apache-2.0
"""KDA prefill providers on a GPU, against the token-by-token reference in fp64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.kernels.mamba.gpu_providers import HEADS, build, errors, reference, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

HARD_CASES: dict[str, dict[str, Any]] = {
    "gaussian": {},
    "gate at the lower bound": {"gate": (30.0, 1.0)},
    "gate at zero": {"gate": (-30.0, 1.0)},
    "mixed gates": {"gate": (0.0, 20.0)},
    "beta near 0": {"beta": (-8.0, 1.0)},
    "beta near 1": {"beta": (8.0, 1.0)},
    "beta near 1, no decay": {"beta": (8.0, 1.0), "gate": (-30.0, 1.0)},
    "tiny norms": {"norm": 1e-4},
    "huge norms": {"norm": 1e4, "value_scale": 1e4},
}
SHAPES = [
    ([16], None),
    ([1], None),
    ([17, 3], None),
    ([64, 65, 63], [[16], [16, 32, 48, 64], []]),
    ([200, 1, 77], [[16, 32, 112, 192], [], [64]]),
    ([512], [[144, 160, 336, 480]]),
    ([1024], [[128, 512, 768, 896]]),
    ([100, 300, 5, 64, 16, 130, 1, 90], [[96], [16, 112, 208, 288], [], [48], [], [128, 64], [], [16]]),
    ([2048], [[1024, 1536, 1792, 1920]]),
]


@pytest.mark.parametrize("lens,offsets", SHAPES)
@pytest.mark.parametrize("resumed", [True, False])
def test_output_and_every_state_match_the_reference(gpu_provider, batch_factory, lens, offsets, resumed):
    batch = batch_factory(lens, offsets, heads=HEADS, device="cuda", resumed=resumed)
    out, state = errors(build(gpu_provider), batch, reference(batch))
    assert out < 1e-2
    assert state < 1e-2


def test_native_takes_checkpoints_at_every_aligned_offset(batch_factory):
    op = build("native")
    for first in range(16, 128, 64):
        batch = batch_factory([144], [[first, first + 16, first + 32, first + 48][:4]], heads=HEADS, device="cuda")
        out, state = errors(op, batch, reference(batch))
        assert out < 1e-2
        assert state < 1e-2


def test_65536_tokens(batch_factory):
    batch = batch_factory([65536], [[16384, 32768, 49152, 65520]], heads=1, device="cuda", gate=(-6.0, 2.0))
    op = build("native", tokens=65536, rows=1, heads=1)
    out, state = errors(op, batch, reference(batch))
    assert out < 1e-2
    assert state < 1e-2


@pytest.mark.parametrize("case", HARD_CASES)
def test_native_error_is_no_larger_than_flashkda(flashkda, batch_factory, case):
    batch = batch_factory([1000], [[256, 512, 768, 896]], heads=HEADS, device="cuda", seed=3, **HARD_CASES[case])
    exact = reference(batch)
    theirs = errors(build("flashkda"), batch, exact)
    ours = errors(build("native"), batch, exact)
    print(f"{case}: native {ours}, flashkda {theirs}")
    # Outputs are bf16, so both carry the same last rounding; 2 % covers its luck.
    assert ours[0] <= 1.02 * theirs[0]
    assert ours[1] <= 1.02 * theirs[1]


def _whole_and_cut(name, batch_factory, lens, offsets, **kwargs):
    op = build(name)
    cut = batch_factory(lens, offsets, heads=HEADS, device="cuda", **kwargs)
    op.run(cut.inputs, cut.checkpoints)
    whole = batch_factory(lens, heads=HEADS, device="cuda", **kwargs)
    op.run(whole.inputs)
    return whole, cut


@pytest.mark.parametrize("lens,offsets", [shape for shape in SHAPES if shape[1]])
def test_segmented_output_is_bit_identical_to_one_launch(flashkda, batch_factory, lens, offsets):
    whole, cut = _whole_and_cut("flashkda", batch_factory, lens, offsets)
    assert torch.equal(cut.out, whole.out)


@pytest.mark.parametrize("gate", [-3.0, -30.0])
def test_segmented_output_differs_only_behind_the_first_cut(flashkda, batch_factory, gate):
    """FlashKDA hands states out as bf16 and goes on with finer ones, so a cut costs it a rounding."""
    lens, offsets = [1024], [[144, 160, 336, 480]]
    whole, cut = _whole_and_cut("flashkda", batch_factory, lens, offsets, gate=(gate, 1.0))
    assert torch.equal(cut.out[:, :160], whole.out[:, :160])
    for state in cut.pool[1:6]:
        assert torch.equal(state, state.bfloat16().float())
    exact = reference(cut)
    assert relative_error(cut.out, exact.out) < 1.05 * relative_error(whole.out, exact.out)
    assert relative_error(cut.pool[1], exact.state_pool[1]) < 1e-2


@pytest.mark.parametrize("gate", [0.0, -30.0])
def test_native_checkpoints_at_whole_steps_change_no_bit(batch_factory, gate):
    lens, offsets = [1000, 300], [[64, 512, 576, 960], [128]]
    whole, cut = _whole_and_cut("native", batch_factory, lens, offsets, gate=(gate, 1.0))
    assert torch.equal(cut.out, whole.out)
    assert torch.equal(cut.pool[1:3], whole.pool[1:3])


@pytest.mark.parametrize("gate", [0.0, -30.0])
def test_native_resumes_from_an_exported_state_without_a_trace(batch_factory, gate):
    """A prefix-cache hit on an exported state continues with the bits of the run that exported it."""
    op = build("native")
    batch = batch_factory([700], [[192, 448]], heads=HEADS, device="cuda", gate=(gate, 1.0))
    op.run(batch.inputs, batch.checkpoints)
    x = batch.inputs
    for index, position in ((2, 192), (3, 448)):
        rest = slice(position, None)
        resumed = dataclasses.replace(
            x,
            q=x.q[:, rest],
            k=x.k[:, rest],
            v=x.v[:, rest],
            g=x.g[:, rest],
            beta=x.beta[:, rest],
            out=torch.empty_like(x.out[:, rest]),
            cu_seqlens=torch.tensor([0, 700 - position], dtype=torch.int32, device="cuda"),
            state_indices=torch.tensor([index], dtype=torch.int32, device="cuda"),
            has_initial_state=torch.tensor([True], device="cuda"),
        )
        op.run(resumed)
        assert torch.equal(resumed.out, batch.out[:, rest])
        assert torch.equal(batch.pool[index], batch.pool[1])


@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_every_recurrence_width_agrees(batch_factory, tiles):
    from vllm.model_executor.layers.mamba.ops.kda_prefill.native import NativeKDAPrefill

    batch = batch_factory([300, 70], [[48, 128], [16]], heads=HEADS, device="cuda")
    build("native").run(batch.inputs, batch.checkpoints)
    other = dataclasses.replace(batch.inputs, state_pool=batch.pool_before.clone(), out=torch.empty_like(batch.out))
    op = NativeKDAPrefill(num_heads=HEADS, max_num_tokens=512, max_num_seqs=4, value_tiles=tiles)
    op.run(other, batch.checkpoints)
    # One tile sums in two chains, so its last bits differ.
    assert relative_error(other.out, batch.out) < 4e-3
    assert relative_error(other.state_pool, batch.pool) < 2e-3


def test_more_rows_than_lanes(batch_factory):
    """Chunks are looked up 32 rows at a time."""
    lens, offsets = [70, 3, 130] * 13, [[64], [], [16, 112, 128]] * 13
    batch = batch_factory(lens, offsets, heads=HEADS, device="cuda")
    out, state = errors(build("native", rows=len(lens)), batch, reference(batch))
    assert out < 1e-2
    assert state < 1e-2


def test_heads_in_turns_give_the_same_bits(batch_factory):
    """Many rows exceed the workspace of full width, so heads run in several launches."""
    lens = [5] * 40
    batch = batch_factory(lens, heads=8, device="cuda")
    narrow, wide = build("native", tokens=200, rows=40, heads=8), build("native", tokens=8192, rows=40, heads=8)
    narrow.run(batch.inputs)
    other = dataclasses.replace(batch.inputs, state_pool=batch.pool_before.clone(), out=torch.empty_like(batch.out))
    wide.run(other)
    assert torch.equal(batch.out, other.out)
    assert torch.equal(batch.pool, other.state_pool)
