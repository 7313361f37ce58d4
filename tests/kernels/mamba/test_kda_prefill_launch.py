# SPDX-License-Identifier: Apache-2.0
"""What the native launcher hands to its library; the library is a stub, so this runs without a GPU."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.model_executor.layers.mamba.ops.kda_prefill import native
from vllm.model_executor.layers.mamba.ops.kda_prefill.native import NativeKDAPrefill, max_chunks


class FakeLibrary:
    """Copies the parameters of every launch; addresses are read while they are valid."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.launches: list[dict[str, Any]] = []

    def kda_prefill_record_bytes(self) -> int:
        return 71168

    def kda_prefill_launch(self, params, large_shared, stream) -> int:
        values = params._obj
        self.launches.append({name: getattr(values, name) for name, _ in values._fields_})
        return self.code

    def kda_prefill_error_string(self, code: int) -> bytes:
        return b"out of registers"


@pytest.fixture
def build_native(monkeypatch):
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))

    def build(library: FakeLibrary, **sizes: int) -> NativeKDAPrefill:
        monkeypatch.setattr(native, "_library", lambda capability: library)
        return NativeKDAPrefill(num_heads=2, **{"max_num_tokens": 512, "max_num_seqs": 4, **sizes})

    return build


def test_addresses_strides_and_counts(batch_factory, build_native):
    library = FakeLibrary()
    batch = batch_factory([100, 60], [[32, 64], [16]])
    x = batch.inputs
    build_native(library).run(x, batch.checkpoints)
    (launch,) = library.launches
    for field, tensor in (
        ("q", x.q),
        ("g", x.g),
        ("beta", x.beta),
        ("a_log", x.A_log),
        ("dt_bias", x.dt_bias),
        ("cu_seqlens", x.cu_seqlens),
        ("state_indices", x.state_indices),
        ("has_initial_state", x.has_initial_state),
        ("checkpoint_offsets", batch.checkpoints.checkpoint_offsets),
        ("checkpoint_state_indices", batch.checkpoints.state_indices),
        ("state_pool", x.state_pool),
        ("out", x.out),
    ):
        assert launch[field] == tensor.data_ptr(), field
    assert launch["q_stride"] == 2 * 128
    assert launch["beta_stride"] == x.beta.stride(1) == 5
    assert launch["state_stride"] == x.state_pool.stride(0) == 2 * 128 * 128 + 64
    assert (launch["num_states"], launch["rows"], launch["heads"]) == (x.state_pool.shape[0], 2, 2)
    assert (launch["head_begin"], launch["head_count"]) == (0, 2)
    assert launch["max_chunks"] == max_chunks(160, 2, checkpoints=True)
    assert launch["value_tiles"] == 1
    assert launch["scale"] == pytest.approx(128**-0.5)
    assert launch["lower_bound"] == -5.0


def test_without_checkpoints_there_are_no_tables(batch_factory, build_native):
    library = FakeLibrary()
    build_native(library).run(batch_factory([100]).inputs)
    (launch,) = library.launches
    assert launch["checkpoint_offsets"] is None
    assert launch["checkpoint_state_indices"] is None


def test_heads_take_turns_in_a_workspace_too_small_for_all(batch_factory, build_native):
    library = FakeLibrary()
    op = build_native(library, max_num_tokens=80, max_num_seqs=16)
    ((bytes_needed,), _), *_ = op.workspace_specs()
    op.run(batch_factory([5] * 16).inputs)
    turns = [(launch["head_begin"], launch["head_count"]) for launch in library.launches]
    assert turns == [(0, 1), (1, 1)]
    for launch in library.launches:
        assert launch["head_count"] * launch["max_chunks"] * 71168 <= bytes_needed


def test_turns_have_equal_sizes(batch_factory, build_native):
    library = FakeLibrary()
    op = build_native(library, max_num_tokens=80, max_num_seqs=16)
    op.run(batch_factory([5] * 5, heads=5).inputs)
    # Four heads would fit.
    assert [(launch["head_begin"], launch["head_count"]) for launch in library.launches] == [(0, 3), (3, 2)]
    assert all(launch["max_chunks"] == 5 for launch in library.launches)


def test_states_off_the_16_byte_grid_are_refused(batch_factory, build_native):
    op = build_native(FakeLibrary())
    batch = batch_factory([32], state_padding=2)
    with pytest.raises(ValueError, match="not at 16-byte boundaries"):
        op.run(batch.inputs)


def test_unaligned_activations_are_copied(batch_factory, build_native):
    library = FakeLibrary()
    x = batch_factory([32]).inputs
    wide = torch.zeros(1, 32, 2 * 128 + 3, dtype=torch.bfloat16)
    q = wide[..., : 2 * 128].unflatten(-1, (2, 128))
    build_native(library).run(dataclasses.replace(x, q=q))
    assert library.launches[0]["q_stride"] == 2 * 128
    assert library.launches[0]["q"] != q.data_ptr()


def test_a_failed_launch_raises(batch_factory, build_native):
    with pytest.raises(RuntimeError, match="failed to launch: out of registers"):
        build_native(FakeLibrary(code=1)).run(batch_factory([32]).inputs)
