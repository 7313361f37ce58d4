# SPDX-License-Identifier: Apache-2.0
"""How many rows of GLM-5.3-Flash's pooled index lie together in a block, on SM12x.

The pooled indexer keeps one row for 16 tokens. Decode scores them with DeepGEMM's paged kernel, which reads the rows
of a block as tiles. The DeepGEMM in vLLM's wheel has tiles of 32 and of 64 rows on SM12x as on other GPUs, but vLLM
lists 64 alone there, and so refuses blocks of 512 tokens. The row of the patch table adds 32 to that list.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm.logger import init_logger

logger = init_logger(__name__)

ROWS = (32, 64)
"""Rows of one block that the paged kernels of vLLM's own DeepGEMM take on SM12x."""

SM12X = 120
"""vLLM's name for the family of SM120 and SM121."""

INDEXER = "vllm.v1.attention.backends.mla.indexer"
"""The module that imports vllm.utils.deep_gemm.get_paged_mqa_page_sizes by name."""

RowCounts = Callable[[], tuple[int, ...]]


def with_32_rows(stock: RowCounts) -> RowCounts:
    """Wrap stock's list of row counts.

    Args:
        stock: `vllm.utils.deep_gemm.get_paged_mqa_page_sizes`.

    Returns:
        A function that answers `ROWS` on SM12x with vLLM's own DeepGEMM, and else what stock answers.
    """

    @functools.wraps(stock)
    def row_counts() -> tuple[int, ...]:
        from vllm.platforms import current_platform

        if not current_platform.is_device_capability_family(SM12X):
            return stock()
        if has_other_deep_gemm():
            logger.warning_once(
                "a deep_gemm package is installed and vLLM prefers it to its own; whether its kernels read 32 rows of "
                "the pooled index at once is not known, so blocks stay multiples of 1,024 tokens: uninstall it for "
                "blocks of 512"
            )
            return stock()
        return ROWS

    return row_counts


def has_other_deep_gemm() -> bool:
    """Whether vLLM would import a DeepGEMM other than the one in its wheel."""
    return importlib.util.find_spec("deep_gemm") is not None


def rebind() -> None:
    """Let vLLM's list say 32 rows on SM12x too."""
    import vllm.utils.deep_gemm as deep_gemm

    _put(with_32_rows(deep_gemm.get_paged_mqa_page_sizes))


@contextmanager
def bound() -> Iterator[None]:
    """As after `rebind`, for planning in a process that may not have the patches; leaves stock's list as it was."""
    import vllm.utils.deep_gemm as deep_gemm

    before = deep_gemm.get_paged_mqa_page_sizes
    _put(with_32_rows(before))
    try:
        yield
    finally:
        _put(before)


def _put(row_counts: RowCounts) -> None:
    import vllm.utils.deep_gemm as deep_gemm

    deep_gemm.get_paged_mqa_page_sizes = row_counts
    # Where the indexer is not imported yet, it will import the new one.
    indexer = sys.modules.get(INDEXER)
    if indexer is not None:
        indexer.get_paged_mqa_page_sizes = row_counts  # type: ignore[attr-defined]
