# SPDX-License-Identifier: Apache-2.0
"""Pages of their own size for attention and recurrent states, instead of stock's one large page.

Stock raises the attention page of a hybrid model until it holds a recurrent state (thousands of tokens), so
short prompts pin large pages and prefix-cache hits land far apart. With the two settings given, both pages keep
their own size; vLLM's block-outermost KV cache layout serves pages of different sizes as it is.

Page sizes become final when a worker has loaded its model, so that is where the settings are applied.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.plugins.kda_prefill_coalescing import GATE, is_on
from vllm.plugins.kda_prefill_coalescing import SPLIT_MAMBA as MAMBA
from vllm.plugins.kda_prefill_coalescing import SPLIT_TARGET as TARGET
from vllm.plugins.kda_prefill_coalescing.config_check import MODELS
from vllm.plugins.kda_prefill_coalescing.layout_check import too_coarse
from vllm.plugins.kda_prefill_coalescing.split_settings import SplitSettings, split_settings
from vllm.v1.core.split_layout_planning import MLA_UNIT, PageSizes, candidates, forms_8k_path

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


def kernel_unit(vllm_config: VllmConfig, backends: Sequence[Any]) -> int:
    """Tokens that an attention page must be a multiple of for every one of the model's attention backends."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(vllm_config):
        supported = [backend.get_supported_kernel_block_sizes() for backend in backends]
    return math.lcm(MLA_UNIT, *(min(getattr(size, "base", size) for size in sizes) for sizes in supported if sizes))


def resolve(settings: SplitSettings, vllm_config: VllmConfig, unit: int) -> PageSizes:
    """The page sizes to use: as given, or for `auto` those that serve the most tokens of cache.

    Raises:
        ValueError: The attention kernels do not take a given size, or nothing is left to choose from.
    """
    for problem in settings.problems(unit):
        raise ValueError(problem)
    target, mamba = settings.given()
    if target is not None and mamba is not None:
        return PageSizes(target, mamba)
    from vllm.v1.core.hybrid_cache_layout import tokens_per_gib

    capacity = {pair: tokens_per_gib(vllm_config, pair) for pair in candidates(unit, target, mamba)}
    best = max(capacity, key=capacity.__getitem__)
    logger.info_once(
        "GLM-5.3-Flash split layout: auto chose %d/%d; tokens of cache per GiB and rank, in requests of %d tokens: %s",
        best.target,
        best.mamba,
        vllm_config.model_config.max_model_len,
        ", ".join(f"{pair.target}/{pair.mamba} {tokens:,}" for pair, tokens in capacity.items()),
    )
    return best


def apply(vllm_config: VllmConfig, unit: int) -> bool:
    """Give `vllm_config` the split layout, if the settings ask for one.

    Args:
        vllm_config: Of a worker that has loaded its model.
        unit: Tokens that an attention page must be a multiple of.

    Returns:
        Whether it has the split layout now, so that stock's alignment must not run.

    Raises:
        ValueError: The engine is not GLM-5.3-Flash with align-mode prefix caching, --block-size says
            something else, or the sizes cannot work.
    """
    settings = split_settings()
    if settings is None:
        return False
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if model.architecture not in MODELS or cache.mamba_cache_mode != "align":
        raise ValueError(
            f"{TARGET} and {MAMBA} are for GLM-5.3-Flash with prefix caching in align mode; this engine serves "
            f"{model.architecture} in Mamba cache mode {cache.mamba_cache_mode}: unset both"
        )
    sizes = resolve(settings, vllm_config, unit)
    contradiction = cache.user_specified_block_size and settings.contradicted_by(cache.block_size, (sizes.target,))
    if contradiction:
        raise ValueError(contradiction)
    cache.block_size, cache.mamba_block_size = sizes
    cache.mamba_page_size_padded = None
    logger.info_once(
        "GLM-5.3-Flash split layout: attention pages of %d tokens, recurrent of %d", sizes.target, sizes.mamba
    )
    return True


def check_pages(vllm_config: VllmConfig, unit: int) -> None:
    """Refuse final page sizes that leave coalescing too little to do; the configuration check foresees them.

    Raises:
        ValueError: Recurrent pages are too coarse for an 8,192-token span.
    """
    page = vllm_config.cache_config.mamba_block_size
    if vllm_config.model_config.architecture in MODELS and page is not None and not forms_8k_path(page):
        raise ValueError(f"{GATE}=1, but this engine cannot coalesce KDA prefill: {too_coarse(page, unit)}")


def rebind() -> None:
    """Ask `apply` first wherever a platform aligns the page sizes of a hybrid model."""
    from vllm.platforms.interface import Platform

    stock: Any = Platform.__dict__["_align_hybrid_block_size"].__func__

    @functools.wraps(stock)
    def align(cls: type[Platform], vllm_config: VllmConfig, backend_cls: Any) -> None:
        unit = kernel_unit(vllm_config, cls._find_non_ssm_backends(vllm_config))
        if not apply(vllm_config, unit):
            stock(cls, vllm_config, backend_cls)
        if is_on(os.environ.get(GATE)):
            check_pages(vllm_config, unit)

    Platform._align_hybrid_block_size = classmethod(align)  # type: ignore[assignment,method-assign]
