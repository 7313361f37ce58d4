# SPDX-License-Identifier: Apache-2.0
"""What decode context parallelism needs on the GPU at hand is known before the weights load."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.model_executor.layers import sparse_attn_indexer
from vllm.platforms.interface import DeviceCapability
from vllm.plugins.kda_prefill_coalescing.dcp_check import MERGED_ROWS, SM10X_CACHE_DTYPES, unmet_by_dcp, unmet_by_heads
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm_kda_prefill.planning_platform import PlanningPlatform


@pytest.fixture
def unmet(monkeypatch):
    def check(tp=4, dcp=4, dtype="fp8_ds_mla", interleave=16, heads=64, topk=8192, capability=9, backend=None):
        value = DeviceCapability(capability, 0)
        monkeypatch.setattr(PlanningPlatform, "get_device_capability", classmethod(lambda cls, device_id=0: value))
        config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(
                tensor_parallel_size=tp, decode_context_parallel_size=dcp, cp_kv_cache_interleave_size=interleave
            ),
            cache_config=SimpleNamespace(cache_dtype=dtype),
            attention_config=SimpleNamespace(backend=backend and AttentionBackendEnum[backend]),
            model_config=SimpleNamespace(
                hf_text_config=SimpleNamespace(num_attention_heads=heads, index_topk=topk, index_kpool=16)
            ),
        )
        return list(unmet_by_dcp(config))

    return check


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"dcp": 2},
        {"interleave": 512},
        {"dtype": "nvfp4_ds_mla"},
        {"tp": 2, "dcp": 2, "heads": 32},
        {"tp": 8, "dcp": 8},
        {"dcp": 1, "dtype": "auto", "interleave": 1, "tp": 1, "topk": 2048},
        {"topk": 32768},
        {"capability": 10, "dtype": "fp8", "tp": 2, "dcp": 2},
        {"capability": 12, "dtype": "fp8", "dcp": 1},
        {"capability": 10, "dtype": "nvfp4_ds_mla"},
        {"backend": "FLASHMLA_SPARSE"},
        {"backend": "FLASHINFER_MLA_SPARSE_SM90", "dcp": 1},
    ],
)
def test_layouts_that_run_are_let_through(unmet, engine):
    assert unmet(**engine) == []


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"interleave": 1}, "every 1 tokens, inside a row of 16 .* pass --cp-kv-cache-interleave-size 16"),
        ({"interleave": 24, "capability": 10}, "every 24 tokens, inside a row of 16"),
        ({"dtype": "auto"}, "this one is auto: pass --kv-cache-dtype fp8_ds_mla"),
        ({"dtype": "fp8"}, "this one is fp8: pass --kv-cache-dtype fp8_ds_mla"),
        ({"tp": 2, "dcp": 2}, "fewer than 32 attention heads a rank, and --tensor-parallel-size 2 leaves 32"),
        ({"topk": 2048}, "not this model's 128 .index_topk 2048 in rows of 16.: pass --decode-context-parallel-size 1"),
        ({"topk": 4096, "capability": 10}, "merges 512, 1024, 2048 rows .* not this model's 256"),
        ({"capability": 12, "dtype": "fp8"}, "on SM12x .* log-sum-exp .*: pass --decode-context-parallel-size 1"),
        ({"capability": 10, "dtype": "fp8_e5m2"}, "a cache of fp8_e5m2: pass --kv-cache-dtype fp8$"),
        (
            {"backend": "FLASHINFER_MLA_SPARSE_SM90"},
            "--attention-backend FLASHINFER_MLA_SPARSE_SM90 returns no log-sum-exp, .*: leave it out",
        ),
        ({"tp": 4, "dcp": 4, "heads": 96}, "the 24 attention heads of one rank and the 96 of the 4 that DCP gathers"),
    ],
)
def test_layouts_that_stock_cannot_run_are_refused(unmet, engine, message):
    (problem,) = unmet(**engine)
    assert re.search(message, problem), problem


def test_stocks_sparse_mla_of_sm12x_runs_without_dcp_only():
    backend = AttentionBackendEnum.FLASHINFER_MLA_SPARSE_SM120.get_class()
    assert not backend.supports_dcp()
    assert not backend.get_impl_cls().can_return_lse_for_decode


def test_all_that_is_wrong_is_named_at_once(unmet):
    assert len(unmet(tp=2, dcp=2, dtype="auto", interleave=1, topk=2048)) == 4


@pytest.mark.parametrize("rows", [1, 64, 128, 256, 512, 1024, 2048, 4096])
def test_stock_merges_the_numbers_of_rows_that_are_let_through(monkeypatch, rows):
    monkeypatch.setattr(sparse_attn_indexer, "has_cutedsl", lambda: True)
    on_a_gpu: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    indices: Any = SimpleNamespace(dtype=torch.int32)
    check = sparse_attn_indexer._assert_cutedsl_dcp_merge_supported
    if rows in MERGED_ROWS:
        check(on_a_gpu, indices, rows)
    else:
        with pytest.raises(RuntimeError, match=f"got {rows}"):
            check(on_a_gpu, indices, rows)


def test_sm10x_cache_dtypes_are_those_of_stocks_dcp_backends():
    names = ("FLASHINFER_MLA_SPARSE", "FLASHMLA_SPARSE")
    backends = [AttentionBackendEnum[name].get_class() for name in names]
    assert all(backend.supports_dcp() for backend in backends)
    assert {dtype for backend in backends for dtype in backend.supported_kv_cache_dtypes} == {*SM10X_CACHE_DTYPES}


@pytest.mark.parametrize(
    ("ranks", "heads", "kda_heads", "messages"),
    [
        (4, 64, 64, []),
        (128, 64, 64, ["128 ranks cannot share 64 attention heads", "128 ranks cannot share 64 KDA heads"]),
        (4, 64, 2, ["4 ranks cannot share 2 KDA heads: pass --tensor-parallel-size 2"]),
        (6, 64, 66, ["6 ranks cannot share 64 attention heads: pass --tensor-parallel-size 2"]),
    ],
)
def test_ranks_that_cannot_share_the_heads_are_refused(ranks, heads, kda_heads, messages):
    text = SimpleNamespace(num_attention_heads=heads, linear_num_heads=kda_heads)
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks), model_config=SimpleNamespace(hf_text_config=text)
    )
    problems = list(unmet_by_heads(config))
    assert len(problems) == len(messages)
    for problem, message in zip(problems, messages, strict=True):
        assert message in problem
