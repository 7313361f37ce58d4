# SPDX-License-Identifier: Apache-2.0
"""Whether an engine's pages are fine enough to coalesce 8,192-token spans, known before its weights load.

Page sizes become final in the workers, after the model is loaded (`split_layout`). Without the two settings they
follow from the configuration by stock's rule, so the configuration check can foresee them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import torch

from vllm.logger import init_logger
from vllm.plugins.kda_prefill_coalescing import SPLIT_MAMBA, SPLIT_TARGET
from vllm.plugins.kda_prefill_coalescing.split_settings import SplitSettings, split_settings
from vllm.v1.core.prefill_plan import MAX_CHECKPOINTS
from vllm.v1.core.split_layout_planning import (
    MLA_UNIT,
    SPAN_TOKENS,
    boundaries_inside,
    candidates,
    fills_span,
    forms_8k_path,
    raised_page,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


def unmet_by_layout(vllm_config: VllmConfig) -> Iterator[str]:
    """Name what is wrong with a GLM-5.3-Flash engine's page sizes, with the way to mend it."""
    settings, unit, cache = split_settings(), attention_unit(vllm_config), vllm_config.cache_config
    if settings is not None:
        problems = list(settings.problems(unit))
        yield from problems
        target, mamba = settings.given()
        targets = {target} if target is not None else {pair.target for pair in candidates(unit, None, mamba)}
        contradiction = cache.user_specified_block_size and settings.contradicted_by(cache.block_size, targets)
        if contradiction and not problems:
            yield contradiction
    page = recurrent_page(vllm_config, settings, unit)
    if page is not None and not forms_8k_path(page):
        yield too_coarse(page, unit)


def warn_unless_spans_are_whole(vllm_config: VllmConfig) -> None:
    """Say so where the chunks of a long prompt cannot use the budget of 8,192 tokens."""
    unit = attention_unit(vllm_config)
    page = recurrent_page(vllm_config, split_settings(), unit)
    if page is not None and not fills_span(page):
        logger.warning_once(
            "KDA prefill coalescing: recurrent pages of %d tokens end the chunks of a long prompt at %d of %d tokens; "
            "%s",
            page,
            SPAN_TOKENS - SPAN_TOKENS % page,
            SPAN_TOKENS,
            _way_out(unit),
        )


def too_coarse(page: int, unit: int) -> str:
    """What is wrong with recurrent pages of `page` tokens."""
    return (
        f"recurrent pages of {page} tokens leave {boundaries_inside(page)} boundaries inside a span of {SPAN_TOKENS} "
        f"tokens, which retains up to {MAX_CHECKPOINTS} states: {_way_out(unit)}"
    )


def _way_out(unit: int) -> str:
    finest = candidates(unit)[:1]
    sizes = f"to {finest[0].target} and {finest[0].mamba}, or to auto" if finest else "to smaller pages"
    return f"set {SPLIT_TARGET} and {SPLIT_MAMBA} {sizes}"


def recurrent_page(vllm_config: VllmConfig, settings: SplitSettings | None, unit: int) -> int | None:
    """Tokens of a recurrent page; None where `auto` chooses it, from sizes that are fine enough."""
    if settings is None:
        return stock_page(vllm_config, unit)
    _, mamba = settings.given()
    return mamba


def attention_unit(vllm_config: VllmConfig) -> int:
    """Tokens that a page of GLM-5.3-Flash's attention group is a multiple of.

    Its pooled indexer keeps a row for `index_kpool` tokens and reads 32 or 64 rows that lie together (64 only on
    SM12x), so a page must hold as many.
    """
    from vllm.utils.deep_gemm import get_paged_mqa_page_sizes

    text = vllm_config.model_config.hf_text_config
    if getattr(text, "index_topk", None) is None:
        return MLA_UNIT
    return math.lcm(MLA_UNIT, text.index_kpool * min(get_paged_mqa_page_sizes()))


def stock_page(vllm_config: VllmConfig, unit: int) -> int:
    """Tokens of the page that stock's alignment will give a GLM-5.3-Flash engine."""
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    text, speculative = model.hf_text_config, vllm_config.speculative_config
    state = MambaSpec(
        block_size=unit,
        shapes=MambaStateShapeCalculator.kda_state_shape(
            parallel.tensor_parallel_size,
            text.linear_num_heads,
            text.linear_head_dim,
            conv_kernel_size=text.linear_conv_kernel_dim,
            num_spec=speculative.num_speculative_tokens if speculative is not None else 0,
        ),
        dtypes=MambaStateDtypeCalculator.kda_state_dtype(
            model.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
        ),
    )
    token = MLAAttentionSpec(
        block_size=1,
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_size=model.get_head_size(),
        dtype=cast(torch.dtype, model.dtype)
        if cache.cache_dtype == "auto"
        else STR_DTYPE_TO_TORCH_DTYPE[cache.cache_dtype],
        cache_dtype_str=cache.cache_dtype,
    )
    block_size = cache.block_size if cache.user_specified_block_size else unit
    return raised_page(state.page_size_bytes, token.page_size_bytes, unit, block_size)
