# SPDX-License-Identifier: Apache-2.0
"""Which block sizes an engine uses, and whether it may: the one place that refuses a block size.

Stock raises the attention block of a hybrid model until it holds a recurrent state (thousands of tokens). Short
prompts then pin large blocks, and prefix-cache hits land far apart. With the two settings given, attention and
Mamba blocks keep their own size. vLLM's block-outermost KV cache layout serves different sizes as it is.

Block sizes become final when a worker has loaded its model (`apply`). What they will be follows from the configuration,
so the configuration check refuses a bad one before the weights load (`unmet_by_layout`). Both ask `block_sizes` for
the rules.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from vllm.kda_prefill_variables import GATE, SPLIT_MAMBA, SPLIT_TARGET
from vllm.logger import init_logger
from vllm.plugins.kda_prefill_coalescing import is_on
from vllm.plugins.kda_prefill_coalescing.index_rows import SM12X
from vllm.v1.core.block_sizes import (
    MLA_UNIT,
    SPAN_TOKENS,
    BlockSettings,
    BlockSizes,
    Size,
    fills_span,
    hint,
    raised_block,
    too_coarse,
    value_problems,
)
from vllm.v1.core.block_sizes import read_size as parse_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

MODELS = ("Glm5NextForCausalLM", "Glm5NextForConditionalGeneration")
"""The architectures whose engines can coalesce, and have block sizes of their own."""


def refuse(problems: Iterable[str]) -> None:
    """Refuse block sizes that have a problem.

    Raises:
        ValueError: The first problem.
    """
    for problem in problems:
        raise ValueError(problem)


# What the settings say.


def read_size(name: str) -> Size | None:
    """The block size that the variable `name` gives, or None where it is not set.

    Raises:
        ValueError: The value is no usable block size.
    """
    text = os.environ.get(name)
    refuse(value_problems(name, text))
    return parse_size(text)


def read_settings() -> BlockSettings | None:
    """Both settings, or None where the layout is stock's.

    Raises:
        ValueError: A value is unusable, one is set without the other, or the recurrent size is no multiple of the
            attention size.
    """
    attention, mamba = read_size(SPLIT_TARGET), read_size(SPLIT_MAMBA)
    if attention is None and mamba is None:
        return None
    if attention is None or mamba is None:
        raise ValueError(f"set {SPLIT_TARGET} and {SPLIT_MAMBA} together, or neither")
    settings = BlockSettings(attention, mamba)
    refuse(settings.ratio_problems())
    return settings


# Before the model is loaded.


def unmet_by_layout(vllm_config: VllmConfig) -> Iterator[str]:
    """Name what is wrong with a GLM-5.3-Flash engine's block sizes, with the way to mend it."""
    settings, unit, cache = read_settings(), attention_unit(vllm_config), vllm_config.cache_config
    if settings is not None:
        problems = list(settings.problems(unit))
        yield from problems
        if cache.user_specified_block_size and not problems:
            yield from settings.contradictions(cache.block_size, {pair.attention for pair in settings.choices(unit)})
    mamba_block = foreseen_mamba_block(vllm_config, settings, unit)
    if mamba_block is not None:
        yield from too_coarse(mamba_block, unit)
    if vllm_config.parallel_config.decode_context_parallel_size > 1:
        # Without settings, attention blocks count as many tokens as Mamba blocks.
        blocks = {pair.attention for pair in settings.choices(unit)} if settings is not None else {mamba_block}
        yield from _cut_by_turns(vllm_config.parallel_config.cp_kv_cache_interleave_size, filter(None, blocks))


def _cut_by_turns(interleave: int, attention_blocks: Iterable[int]) -> Iterator[str]:
    """Why ranks that take turns every `interleave` tokens cannot share blocks; stock asserts it after the load."""
    cut = sorted(block for block in attention_blocks if block % interleave)
    if cut:
        yield (
            f"ranks take turns every {interleave} tokens, which is no divisor of an attention block of {cut[0]}: pass "
            f"--cp-kv-cache-interleave-size {math.gcd(interleave, cut[0])}"
        )


def warn_unless_spans_are_whole(vllm_config: VllmConfig) -> None:
    """Say so where the chunks of a long prompt cannot use the budget of 8,192 tokens."""
    unit = attention_unit(vllm_config)
    mamba_block = foreseen_mamba_block(vllm_config, read_settings(), unit)
    if mamba_block is not None and not fills_span(mamba_block):
        logger.warning_once(
            "KDA prefill coalescing: Mamba blocks of %d tokens end the chunks of a long prompt at %d of %d tokens; %s",
            mamba_block,
            SPAN_TOKENS - SPAN_TOKENS % mamba_block,
            SPAN_TOKENS,
            hint(unit),
        )


def foreseen_mamba_block(vllm_config: VllmConfig, settings: BlockSettings | None, unit: int) -> int | None:
    """Tokens of a Mamba block; None where `auto` chooses it, from sizes that are fine enough."""
    if settings is None:
        return stock_block(vllm_config, unit)
    return settings.given()[1]


def attention_unit(vllm_config: VllmConfig) -> int:
    """Tokens that a block of GLM-5.3-Flash's attention group is a multiple of.

    Its pooled indexer keeps a row for `index_kpool` tokens and reads 32 or 64 rows that lie together, so a block
    must hold as many; `index_rows` is about SM12x.
    """
    from vllm.utils.deep_gemm import get_paged_mqa_page_sizes

    text = vllm_config.model_config.hf_text_config
    if getattr(text, "index_topk", None) is None:
        return MLA_UNIT
    return math.lcm(MLA_UNIT, text.index_kpool * min(get_paged_mqa_page_sizes()))


def stock_block(vllm_config: VllmConfig, unit: int) -> int:
    """Tokens of the block that stock's alignment will give a GLM-5.3-Flash engine."""
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
    cache_dtype = settled_cache_dtype(vllm_config)
    token = MLAAttentionSpec(
        block_size=1,
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_size=model.get_head_size(),
        dtype=cast(torch.dtype, model.dtype) if cache_dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[cache_dtype],
        cache_dtype_str=cache_dtype,
    )
    block_size = cache.block_size if cache.user_specified_block_size else unit
    return raised_block(state.page_size_bytes, token.page_size_bytes, unit, block_size)


def settled_cache_dtype(vllm_config: VllmConfig) -> str:
    """What the cache's dtype will be once the layers are made: SM12x has sparse MLA for packed fp8 alone."""
    from vllm.platforms import current_platform

    dtype = vllm_config.cache_config.cache_dtype
    sparse = getattr(vllm_config.model_config.hf_text_config, "index_topk", None) is not None
    if sparse and dtype in ("auto", "fp8", "fp8_e4m3") and current_platform.is_device_capability_family(SM12X):
        return "fp8_ds_mla"
    return dtype


# In a worker that has loaded its model.


def kernel_unit(vllm_config: VllmConfig, backends: Sequence[Any]) -> int:
    """Tokens that an attention block must be a multiple of for every one of the model's attention backends."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(vllm_config):
        supported = [backend.get_supported_kernel_block_sizes() for backend in backends]
    return math.lcm(MLA_UNIT, *(min(getattr(size, "base", size) for size in sizes) for sizes in supported if sizes))


def resolve(settings: BlockSettings, vllm_config: VllmConfig, unit: int) -> BlockSizes:
    """The block sizes to use: as given, or for `auto` those that serve the most tokens of cache.

    Raises:
        ValueError: The attention kernels do not take a given size, or nothing is left to choose from.
    """
    refuse(settings.problems(unit))
    choices = settings.choices(unit)
    if None not in settings.given():
        return choices[0]
    from vllm.v1.core.cache_capacity import tokens_per_gib

    capacity = {pair: tokens_per_gib(vllm_config, pair) for pair in choices}
    best = max(capacity, key=capacity.__getitem__)
    logger.info_once(
        "GLM-5.3-Flash split layout: auto chose %s; tokens of cache per GiB and rank, in requests of %d tokens: %s",
        best,
        vllm_config.model_config.max_model_len,
        ", ".join(f"{pair} {tokens:,}" for pair, tokens in capacity.items()),
    )
    return best


def apply(vllm_config: VllmConfig, unit: int) -> bool:
    """Give `vllm_config` the split layout, if the settings ask for one.

    Args:
        vllm_config: Of a worker that has loaded its model.
        unit: Tokens that an attention block must be a multiple of.

    Returns:
        Whether it has the split layout now, so that stock's alignment must not run.

    Raises:
        ValueError: The engine is not GLM-5.3-Flash with align-mode prefix caching, --block-size says
            something else, or the sizes cannot work.
    """
    settings = read_settings()
    if settings is None:
        return False
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if model.architecture not in MODELS or cache.mamba_cache_mode != "align":
        raise ValueError(
            f"{SPLIT_TARGET} and {SPLIT_MAMBA} are for GLM-5.3-Flash with prefix caching in align mode; this engine "
            f"serves {model.architecture} in Mamba cache mode {cache.mamba_cache_mode}: unset both"
        )
    sizes = resolve(settings, vllm_config, unit)
    if cache.user_specified_block_size:
        refuse(settings.contradictions(cache.block_size, {sizes.attention}))
    cache.block_size, cache.mamba_block_size = sizes
    cache.mamba_page_size_padded = None
    logger.info_once(
        "GLM-5.3-Flash split layout: attention blocks of %d tokens, Mamba blocks of %d",
        sizes.attention,
        sizes.mamba,
    )
    return True


def check_final_blocks(vllm_config: VllmConfig, unit: int) -> None:
    """Refuse final block sizes that leave coalescing too little to do; the configuration check foresees them.

    Raises:
        ValueError: Mamba blocks are too coarse for an 8,192-token span.
    """
    mamba_block = vllm_config.cache_config.mamba_block_size
    if vllm_config.model_config.architecture in MODELS and mamba_block is not None:
        problems = too_coarse(mamba_block, unit)
        refuse(f"{GATE}=1, but this engine cannot coalesce KDA prefill: {problem}" for problem in problems)


def rebind() -> None:
    """Ask `apply` first wherever a platform aligns the block sizes of a hybrid model."""
    from vllm.platforms.interface import Platform

    stock: Any = Platform.__dict__["_align_hybrid_block_size"].__func__

    @functools.wraps(stock)
    def align(cls: type[Platform], vllm_config: VllmConfig, backend_cls: Any) -> None:
        unit = kernel_unit(vllm_config, cls._find_non_ssm_backends(vllm_config))
        if not apply(vllm_config, unit):
            stock(cls, vllm_config, backend_cls)
        if is_on(os.environ.get(GATE)):
            check_final_blocks(vllm_config, unit)

    Platform._align_hybrid_block_size = classmethod(align)  # type: ignore[assignment,method-assign]
