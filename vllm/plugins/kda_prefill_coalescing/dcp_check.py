# SPDX-License-Identifier: Apache-2.0
"""Whether stock's attention can run GLM-5.3-Flash under decode context parallelism on the GPU at hand.

Stock finds out after the weights are loaded, one condition at a time. Hopper has a single sparse MLA kernel that
returns what the ranks' partial results are merged with (FlashMLA), and that one in a single form. SM12x has none.
On any NVIDIA GPU the ranks' indexers must select as many rows as stock's merge of their selections was made for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HOPPER, SM10X, SM12X = 9, 10, 12
CACHE_DTYPES = ("fp8_ds_mla", "nvfp4_ds_mla")
SM10X_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla")
"""What the two sparse MLA backends of SM10x that support DCP keep, FLASHINFER_MLA_SPARSE and FLASHMLA_SPARSE."""

HEADS_OF_ONE_BATCH = 32
"""From this many heads a rank on, FlashMLA runs prefills apart from decodes and returns nothing to merge for them."""

MERGED_ROWS = (512, 1024, 2048)
"""How many rows the ranks' indexers may select, for their selections to be merged. Other numbers end the engine, at
start or at the first sequence that is longer than what an indexer selects."""

HEAD_PADDINGS = (64, 128)
"""Query heads that FlashMLA's fp8 kernel pads to."""


def unmet_by_heads(vllm_config: VllmConfig) -> Iterator[str]:
    """Name each kind of heads that the tensor parallel ranks cannot share evenly, as where ranks outnumber heads."""
    ranks, text = vllm_config.parallel_config.tensor_parallel_size, vllm_config.model_config.hf_text_config
    for kind, heads in (("attention", text.num_attention_heads), ("KDA", text.linear_num_heads)):
        if heads % ranks:
            most = math.gcd(heads, ranks)
            yield f"{ranks} ranks cannot share {heads} {kind} heads: pass --tensor-parallel-size {most}"


def unmet_by_dcp(vllm_config: VllmConfig) -> Iterator[str]:
    """Name each condition of decode context parallelism that is not met, with the way to meet it."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    ranks = parallel.decode_context_parallel_size
    if ranks == 1:
        return
    text = model.hf_text_config
    rows = getattr(text, "index_kpool", 1)
    selected = text.index_topk // rows
    if selected not in MERGED_ROWS:
        yield (
            f"vLLM merges {', '.join(map(str, MERGED_ROWS))} rows that the ranks' indexers select, not this model's "
            f"{selected} (index_topk {text.index_topk} in rows of {rows}): pass --decode-context-parallel-size 1"
        )
    interleave = parallel.cp_kv_cache_interleave_size
    if interleave % rows:
        yield (
            f"ranks take turns every {interleave} tokens, inside a row of {rows} of the indexer: pass "
            f"--cp-kv-cache-interleave-size {rows} or a multiple"
        )
    yield from _unmet_by_backend(vllm_config)
    capability = current_platform.get_device_capability()
    dtype = vllm_config.cache_config.cache_dtype
    if capability is not None and capability.major == SM10X and dtype not in SM10X_CACHE_DTYPES:
        yield f"on SM10x no sparse MLA kernel with DCP keeps a cache of {dtype}: pass --kv-cache-dtype fp8"
    if capability is not None and capability.major == HOPPER:
        yield from _unmet_on_hopper(vllm_config)
    if capability is not None and capability.major == SM12X:
        yield (
            "on SM12x vLLM's sparse MLA kernel (FLASHINFER_MLA_SPARSE_SM120) is not asked for the log-sum-exp that "
            "ranks' results are merged with: pass --decode-context-parallel-size 1"
        )


def _unmet_by_backend(vllm_config: VllmConfig) -> Iterator[str]:
    backend = vllm_config.attention_config.backend
    if backend is None:
        return
    try:
        merges = backend.get_class().supports_dcp()
    except (ImportError, ValueError):
        return  # Stock says why it cannot be loaded.
    if not merges:
        yield (
            f"--attention-backend {backend.name} returns no log-sum-exp, which ranks' results are merged with: leave "
            "it out, or pass --decode-context-parallel-size 1"
        )


def _unmet_on_hopper(vllm_config: VllmConfig) -> Iterator[str]:
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    tensor, ranks = parallel.tensor_parallel_size, parallel.decode_context_parallel_size
    dtype = vllm_config.cache_config.cache_dtype
    if dtype not in CACHE_DTYPES:
        yield f"on Hopper DCP needs a quantized MLA cache, and this one is {dtype}: pass --kv-cache-dtype fp8_ds_mla"
    heads = model.hf_text_config.num_attention_heads // tensor
    if heads >= HEADS_OF_ONE_BATCH:
        yield (
            f"on Hopper DCP needs fewer than {HEADS_OF_ONE_BATCH} attention heads a rank, and "
            f"--tensor-parallel-size {tensor} leaves {heads}: pass a larger one, or "
            "--decode-context-parallel-size 1"
        )
    elif _padded(heads) != _padded(heads * ranks):
        yield (
            f"on Hopper the {heads} attention heads of one rank and the {heads * ranks} of the "
            f"{ranks} that DCP gathers must pad to the same {HEAD_PADDINGS[0]}: pass a smaller "
            "--decode-context-parallel-size"
        )


def _padded(heads: int) -> int:
    return next((size for size in HEAD_PADDINGS if heads <= size), heads)
