# SPDX-License-Identifier: Apache-2.0
"""Properties every KDA prefill provider keeps; on the CPU over the reference kernel."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.model_executor.layers.mamba.ops.kda_prefill import Checkpoints, select_kda_prefill
from vllm.model_executor.layers.mamba.ops.kda_prefill import checkpoints as checkpoints_module
from vllm.model_executor.layers.mamba.ops.kda_prefill import select as select_module
from vllm.model_executor.layers.mamba.ops.kda_prefill.base import KDAPrefill
from vllm.model_executor.layers.mamba.ops.kda_prefill.native import CHUNK_TOKENS, max_chunks
from vllm.model_executor.layers.mamba.ops.kda_prefill.reference import ReferenceKDAPrefill
from vllm.model_executor.layers.mamba.ops.kda_prefill.segmented import (
    Launch,
    Launcher,
    SegmentedKDAPrefill,
)
from vllm.model_executor.layers.mamba.ops.kda_prefill.segments import plan_segments


class ReferenceLauncher(Launcher):
    """A one-checkpoint kernel made of the reference, that counts what it was asked to do."""

    name = "fake"

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def workspace_specs(self):
        return (((1,), torch.uint8),)

    def __call__(self, launch: Launch, workspace) -> None:
        rows = launch.initial.shape[0]
        self.tokens.append(launch.q.shape[1])
        states = torch.cat([torch.zeros_like(launch.initial[:1]), launch.initial, launch.initial])
        inputs = _inputs_of(launch, states, rows)
        offsets = torch.zeros(rows, 4, dtype=torch.int32)
        if launch.checkpoint_offsets is not None:
            assert launch.checkpoint_offsets.dtype == launch.cu_seqlens.dtype
            offsets[:, 0] = launch.checkpoint_offsets
        indices = torch.zeros_like(offsets)
        indices[:, 0] = torch.arange(rows + 1, 2 * rows + 1) * (offsets[:, 0] > 0)
        lens = launch.cu_seqlens.diff().tolist()
        ReferenceKDAPrefill().run(inputs, Checkpoints(offsets, indices, offsets.tolist(), lens, indices.tolist()))
        launch.final.copy_(states[1 : rows + 1])
        if launch.checkpoint is not None:
            launch.checkpoint.copy_(states[rows + 1 :])


def _inputs_of(launch: Launch, states: torch.Tensor, rows: int):
    from vllm.model_executor.layers.mamba.ops.kda_prefill import KDAPrefillInputs

    return KDAPrefillInputs(
        q=launch.q,
        k=launch.k,
        v=launch.v,
        g=launch.g,
        beta=launch.beta,
        A_log=launch.A_log,
        dt_bias=launch.dt_bias,
        scale=launch.scale,
        lower_bound=launch.lower_bound,
        cu_seqlens=launch.cu_seqlens,
        state_pool=states,
        state_indices=torch.arange(1, rows + 1, dtype=torch.int32),
        has_initial_state=torch.ones(rows, dtype=torch.bool),
        out=launch.out,
    )


def segmented() -> SegmentedKDAPrefill:
    return SegmentedKDAPrefill(ReferenceLauncher(), num_heads=2, max_num_tokens=512, max_num_seqs=8)


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


def test_four_checkpoints_take_three_launches_of_new_tokens(batch_factory):
    launcher = ReferenceLauncher()
    op = SegmentedKDAPrefill(launcher, num_heads=2, max_num_tokens=512, max_num_seqs=8)
    batch = batch_factory([128], [[64, 96, 112, 16]])
    op.run(batch.inputs, batch.checkpoints)
    assert launcher.tokens == [64, 48, 16]
    launcher.tokens.clear()
    batch = batch_factory([20, 128, 33], [[], [64], []])
    op.run(batch.inputs, batch.checkpoints)
    assert launcher.tokens == [181]


def test_segments_cover_every_token_once():
    lens = [100, 1, 64, 33]
    launches = plan_segments([[16, 32, 48, 96], [], [16, 0, 48], [32]], lens)
    covered = sorted((s.row, t) for segments in launches for s in segments for t in range(s.begin, s.end))
    assert covered == [(row, t) for row, length in enumerate(lens) for t in range(length)]
    assert [len(segments) for segments in launches] == [4, 2, 1]


def test_batch_beyond_the_workspace_is_refused(batch_factory):
    op = SegmentedKDAPrefill(ReferenceLauncher(), num_heads=2, max_num_tokens=64, max_num_seqs=1)
    with pytest.raises(ValueError, match="batch of 1 rows and 65 tokens"):
        op.run(batch_factory([65]).inputs)


SELECT: dict[str, Any] = {
    "head_dim": 128,
    "dtype": torch.bfloat16,
    "lower_bound": -5.0,
    "max_num_tokens": 64,
    "max_num_seqs": 2,
    "num_heads": 2,
}


@pytest.mark.parametrize(
    "backend,capability,change,reason",
    [
        ("flashkda", (8, 0), {}, "needs SM90, SM10x or SM12x, this device is SM80"),
        ("b12x", (9, 0), {}, "needs SM120 or SM121, this device is SM90"),
        ("native", None, {}, "this device is not a CUDA GPU"),
        ("native", (9, 0), {"head_dim": 64}, "head size is 64"),
        ("flashkda", (9, 0), {"dtype": torch.float16}, "activations are torch.float16"),
        ("flashkda", (9, 0), {"lower_bound": None}, "lower bound is None"),
        ("native", (9, 0), {"lower_bound": -6.0}, "lower bound is -6.0"),
    ],
)
def test_explicit_choice_that_cannot_run_fails_with_the_reason(backend, capability, change, reason):
    with pytest.raises(RuntimeError, match=reason):
        select_kda_prefill(backend, capability=capability, **{**SELECT, **change})


def test_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="unknown KDA prefill backend 'fast'"):
        select_kda_prefill("fast", capability=(9, 0), **SELECT)


def test_auto_and_triton_fall_back_to_the_stock_path():
    assert select_kda_prefill("triton", capability=(9, 0), **SELECT) is None
    assert select_kda_prefill("auto", capability=(8, 0), **SELECT) is None
    assert isinstance(select_kda_prefill("reference", capability=None, **SELECT), ReferenceKDAPrefill)


def test_auto_is_flashkda_where_native_cannot_be_built(monkeypatch, caplog):
    def refuse(sizes):
        raise RuntimeError("nvcc was not found")

    built = object()
    monkeypatch.setitem(select_module._BUILDERS, "native", refuse)
    monkeypatch.setitem(select_module._BUILDERS, "flashkda", lambda sizes: built)
    assert select_kda_prefill("auto", capability=(9, 0), **SELECT) is built
    assert "'native' is passed over: nvcc was not found" in caplog.text
    with pytest.raises(RuntimeError, match="nvcc was not found"):
        select_kda_prefill("native", capability=(9, 0), **SELECT)


@pytest.mark.parametrize("capability,expected", [((9, 0), "native"), ((12, 1), "flashkda"), ((10, 0), "flashkda")])
def test_auto_prefers_the_native_kernel_where_it_was_measured(monkeypatch, capability, expected):
    for name in ("native", "flashkda"):
        monkeypatch.setitem(select_module._BUILDERS, name, lambda sizes, name=name: name)
    assert select_kda_prefill("auto", capability=capability, **SELECT) == expected


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 400), st.lists(st.integers(1, 24), max_size=4, unique=True)),
        min_size=1,
        max_size=6,
    )
)
def test_native_workspace_holds_every_chunk(rows):
    chunks = 0
    for length, cuts in rows:
        bounds = [0, *sorted(16 * cut for cut in cuts if 16 * cut < length), length]
        chunks += sum(-(-(b - a) // CHUNK_TOKENS) for a, b in pairwise(bounds))
    tokens = sum(length for length, _ in rows)
    assert chunks <= max_chunks(tokens, len(rows), checkpoints=True)
    whole = sum(-(-length // CHUNK_TOKENS) for length, _ in rows)
    assert whole <= max_chunks(tokens, len(rows), checkpoints=False)
