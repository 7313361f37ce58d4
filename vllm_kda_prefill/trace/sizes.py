# SPDX-License-Identifier: Apache-2.0
"""How many blocks, and KDA groups, an amount of memory gives: the arithmetic of `kda-prefill layout`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# The platform first: see there.
from vllm_kda_prefill.planning import GLM_SHAPES  # isort: skip

from vllm.v1.core.split_layout_planning import PageSizes
from vllm_kda_prefill.cache_report import EngineShape, make_report
from vllm_kda_prefill.trace.errors import TraceError


@dataclass(frozen=True)
class MemoryLayout:
    """What the memory of one rank holds.

    Attributes:
        num_blocks: For each amount of memory that was asked for.
        mamba_groups: KV cache groups of KDA layers.
        open_pool: Tokens of the indexer's open pool's one block a request, 0 without an indexer.
    """

    num_blocks: list[int]
    mamba_groups: int
    open_pool: int


def of_memory(memories: list[int], model: Path | None, tp: int, dcp: int, mtp: int, block: int) -> MemoryLayout:
    """Lay out the KV cache of one rank.

    Args:
        memories: Bytes of KV cache on one rank.
        model: Folder of a config.json, None for the GLM-5.3-Flash shapes.
        tp: Tensor parallel ranks.
        dcp: Decode context parallel ranks, a divisor of `tp`.
        mtp: Draft tokens.
        block: Tokens of an attention block on one rank and of a recurrent block.

    Raises:
        TraceError: An amount does not hold two blocks.
        ValueError: vLLM has no such layout.
    """
    with _folder(model) as folder:
        report = make_report(EngineShape(folder, tp, dcp, mtp), max(memories), PageSizes(block, block))
    layout = report.layouts[f"{block}/{block}"]
    blocks = [layout.blocks(memory) for memory in memories]
    for memory, count in zip(memories, blocks, strict=True):
        if count < 2:
            raise TraceError(f"--memory {memory} bytes: a block takes {layout.block_bytes} bytes; give more")
    scratch = layout.of_kind("scratch")
    return MemoryLayout(blocks, len(layout.of_kind("recurrent")), scratch[0].block_tokens if scratch else 0)


@contextmanager
def _folder(model: Path | None) -> Iterator[Path]:
    """A folder with the model's config.json."""
    if model is not None:
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(GLM_SHAPES))
        yield Path(folder)
