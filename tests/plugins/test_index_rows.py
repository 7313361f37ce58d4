# SPDX-License-Identifier: Apache-2.0
"""vLLM says that the pooled index may have 32 rows in a block on SM12x, and only where its own DeepGEMM is used."""

import sys
from typing import Any

import pytest
import torch

from vllm_kda_prefill.layer_stubs import as_gpu  # isort: skip  (the platform before vLLM)

from vllm.plugins.kda_prefill_coalescing import index_rows
from vllm.utils import deep_gemm
from vllm.v1.attention.backends.mla import indexer
from vllm.v1.attention.backends.mla.indexer import Glm5NextIndexerBackend
from vllm.v1.kv_cache_interface import MLAAttentionSpec


def block_sizes() -> list[Any]:
    spec = MLAAttentionSpec(block_size=512, num_kv_heads=1, head_size=132, dtype=torch.uint8, tokens_per_state=16)
    return list(Glm5NextIndexerBackend.get_supported_kernel_block_sizes(spec))


@pytest.mark.parametrize("capability", [9, 10, 12])
def test_the_indexer_takes_blocks_of_512_and_1024_tokens(capability):
    with as_gpu(capability):
        assert block_sizes() == ([1024] if capability == 12 else [512, 1024])
        with index_rows.bound():
            assert block_sizes() == [512, 1024]
            assert deep_gemm.get_paged_mqa_page_sizes() == (32, 64)
        assert block_sizes() == ([1024] if capability == 12 else [512, 1024])


def test_with_another_deep_gemm_blocks_stay_of_1024_tokens(monkeypatch, tmp_path):
    warnings = []
    monkeypatch.setattr(index_rows.logger, "warning_once", lambda message, *args: warnings.append(message % args))
    (tmp_path / "deep_gemm.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with as_gpu(12), index_rows.bound():
        assert block_sizes() == [1024]
    assert "uninstall it for blocks of 512" in warnings[0]
    warnings.clear()
    with as_gpu(9), index_rows.bound():
        assert block_sizes() == [512, 1024]
    assert warnings == []


def test_the_patch_reaches_an_indexer_imported_before_or_after(monkeypatch):
    for module in (deep_gemm, indexer):
        monkeypatch.setattr(module, "get_paged_mqa_page_sizes", lambda: (64,))
    monkeypatch.delitem(sys.modules, index_rows.INDEXER)
    index_rows.rebind()
    assert indexer.get_paged_mqa_page_sizes() == (64,)
    monkeypatch.setitem(sys.modules, index_rows.INDEXER, indexer)
    index_rows.rebind()
    with as_gpu(12):
        assert deep_gemm.get_paged_mqa_page_sizes() == indexer.get_paged_mqa_page_sizes() == (32, 64)
