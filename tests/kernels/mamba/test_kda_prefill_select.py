# SPDX-License-Identifier: Apache-2.0
"""Which provider a server gets: the one it names, or the best that its device can run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm.model_executor.layers.mamba.ops.kda_prefill import select as select_module
from vllm.model_executor.layers.mamba.ops.kda_prefill import select_kda_prefill
from vllm.model_executor.layers.mamba.ops.kda_prefill.reference import ReferenceKDAPrefill

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
