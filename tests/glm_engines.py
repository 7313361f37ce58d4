# SPDX-License-Identifier: Apache-2.0
"""GLM-5.3-Flash engines whose block sizes vLLM's own alignment has made final, without a GPU and without weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_kda_prefill.layer_stubs import as_gpu  # isort: skip  (the platform before vLLM)

from vllm.config import VllmConfig
from vllm.kda_prefill_variables import GATE, SPLIT_MAMBA, SPLIT_TARGET
from vllm.platforms import current_platform
from vllm.platforms.interface import Platform
from vllm.plugins.kda_prefill_coalescing import block_layout
from vllm_kda_prefill.layout.report import EngineShape

RANKS = [(tp, dcp) for tp, dcp in itertools.product((1, 2, 4, 8), (1, 2, 4)) if tp % dcp == 0]
SHAPES = list(itertools.product(RANKS, ("auto", "fp8"), (0, 3)))
"""(Tensor and decode context parallel ranks), the cache's dtype, and draft tokens: every engine that is looked at."""

SetSizes = Callable[[int | str, int | str], None]


def size_setter(monkeypatch: Any) -> SetSizes:
    """Unset the gate and both sizes, and return what sets the sizes."""
    for name in (GATE, SPLIT_TARGET, SPLIT_MAMBA):
        monkeypatch.delenv(name, raising=False)

    def set_sizes(attention: int | str, mamba: int | str) -> None:
        monkeypatch.setenv(SPLIT_TARGET, str(attention))
        monkeypatch.setenv(SPLIT_MAMBA, str(mamba))

    return set_sizes


@contextmanager
def patched() -> Iterator[None]:
    """Vllm's alignment with this fork's patch, taken out again afterwards."""
    stock = Platform.__dict__["_align_hybrid_block_size"]
    block_layout.rebind()
    try:
        yield
    finally:
        Platform._align_hybrid_block_size = stock  # type: ignore[method-assign]


def unaligned(
    tp: int = 1, dcp: int = 1, dtype: str = "auto", mtp: int = 0, *, block_size: int | None = None, **options: Any
) -> VllmConfig:
    """A configuration as before its model is loaded; call it, and what looks at it, inside `as_gpu`."""
    config = EngineShape(tp=tp, dcp=dcp, mtp=mtp, kv_cache_dtype=dtype, **{"max_model_len": 16384, **options})
    made = config.vllm_config()
    if block_size is not None:
        made.cache_config.block_size, made.cache_config.user_specified_block_size = block_size, True
    return made


def align(config: VllmConfig) -> None:
    """Make the block sizes final, as a worker's start does."""
    with patched():
        current_platform.update_block_size_for_backend(config)


def aligned(*engine: Any, capability: int = 9, **options: Any) -> VllmConfig:
    """A configuration whose block sizes a worker's start has made final; arguments as for `unaligned`."""
    with as_gpu(capability):
        config = unaligned(*engine, capability=capability, **options)
        align(config)
    return config
