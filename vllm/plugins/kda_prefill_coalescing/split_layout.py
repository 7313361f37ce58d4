# SPDX-License-Identifier: Apache-2.0
"""Pages of their own size for attention and recurrent states, instead of stock's one large page.

Stock raises the attention page of a hybrid model until it holds a recurrent state (thousands of tokens), so
short prompts pin large pages and prefix-cache hits land far apart. With the two settings given, both pages keep
their own size; vLLM's block-outermost KV cache layout serves pages of different sizes as it is.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.plugins.kda_prefill_coalescing import SPLIT_MAMBA as MAMBA
from vllm.plugins.kda_prefill_coalescing import SPLIT_TARGET as TARGET
from vllm.plugins.kda_prefill_coalescing.config_check import MODELS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

MLA_UNIT = 128
"""MLA decode kernels take blocks in multiples of this; it is a multiple of the KDA chunk too."""


def read_size(name: str) -> int | None:
    """The page size a setting names, in tokens, or None where it is not set.

    Raises:
        ValueError: The value is no usable page size.
    """
    value = os.environ.get(name)
    if not value:
        return None
    size = int(value) if value.isascii() and value.isdigit() else 0
    if size <= 0 or size % MLA_UNIT:
        near = max(MLA_UNIT, size // MLA_UNIT * MLA_UNIT)
        raise ValueError(
            f"{name}={value!r} is not a positive multiple of {MLA_UNIT} tokens; the nearest that work are "
            f"{near} and {near + MLA_UNIT}"
        )
    return size


def split_sizes() -> tuple[int, int] | None:
    """Both page sizes in tokens (target, recurrent), or None where the layout is stock's.

    Raises:
        ValueError: One is set without the other, or the recurrent one is no multiple of the target one.
    """
    target, mamba = read_size(TARGET), read_size(MAMBA)
    if target is None and mamba is None:
        return None
    if target is None or mamba is None:
        raise ValueError(f"set {TARGET} and {MAMBA} together, or neither")
    if mamba % target:
        near = max(target, mamba // target * target)
        raise ValueError(
            f"{MAMBA}={mamba} is not a multiple of {TARGET}={target}; the nearest that work are "
            f"{near} and {near + target}"
        )
    return target, mamba


def apply(vllm_config: VllmConfig) -> bool:
    """Give `vllm_config` the split layout, if the settings ask for one.

    Returns:
        Whether it has the split layout now, so that stock's alignment must not run.

    Raises:
        ValueError: The engine is not GLM-5.3-Flash with align-mode prefix caching, or --block-size says
            something else.
    """
    sizes = split_sizes()
    if sizes is None:
        return False
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if model.architecture not in MODELS or cache.mamba_cache_mode != "align":
        raise ValueError(
            f"{TARGET} and {MAMBA} are for GLM-5.3-Flash with prefix caching in align mode; this engine serves "
            f"{model.architecture} in Mamba cache mode {cache.mamba_cache_mode}: unset both"
        )
    target, mamba = sizes
    if cache.user_specified_block_size and cache.block_size != target:
        raise ValueError(f"--block-size {cache.block_size} contradicts {TARGET}={target}: leave one out")
    cache.block_size, cache.mamba_block_size = target, mamba
    cache.mamba_page_size_padded = None
    logger.info_once("GLM-5.3-Flash split layout: attention pages of %d tokens, recurrent of %d", target, mamba)
    return True


def rebind() -> None:
    """Ask `apply` first wherever a platform aligns the page sizes of a hybrid model."""
    from vllm.platforms.interface import Platform

    stock: Any = Platform.__dict__["_align_hybrid_block_size"].__func__

    @functools.wraps(stock)
    def align(cls: type[Platform], vllm_config: VllmConfig, backend_cls: Any) -> None:
        if not apply(vllm_config):
            stock(cls, vllm_config, backend_cls)

    Platform._align_hybrid_block_size = classmethod(align)  # type: ignore[assignment,method-assign]
