# SPDX-License-Identifier: Apache-2.0
"""How many blocks, and KDA groups, an amount of memory gives: the arithmetic of `kda-prefill layout`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# The platform first: see there.
from vllm_kda_prefill.layout.report import EngineShape, make_report  # isort: skip

from vllm.v1.core.block_sizes import BlockSizes
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
        block: Tokens of an attention block on one rank and of a Mamba block.

    Raises:
        TraceError: An amount does not hold two blocks.
        ValueError: vLLM has no such layout.
    """
    sizes = BlockSizes(block, block)
    layout = make_report(EngineShape(model, tp, dcp, mtp), max(memories), sizes).layouts[str(sizes)]
    blocks = [layout.blocks(memory) for memory in memories]
    for memory, count in zip(memories, blocks, strict=True):
        if count < 2:
            raise TraceError(f"--memory {memory} bytes: a block takes {layout.block_bytes} bytes; give more")
    scratch = layout.of_kind("scratch")
    return MemoryLayout(blocks, len(layout.of_kind("mamba")), scratch[0].block_tokens if scratch else 0)
