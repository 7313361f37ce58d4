# SPDX-License-Identifier: Apache-2.0
"""Tiny traces, written by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence

from vllm_kda_prefill.trace.prompts import PrefixTree, Prompt, Trace


def make_trace(
    *prompts: tuple[int, Sequence[int]], block_size: int = 512, times: Sequence[float] | None = None
) -> Trace:
    """Prompts of (tokens, block ids)."""
    tree = PrefixTree()
    root = tree.fresh()
    made = []
    for number, (tokens, ids) in enumerate(prompts):
        assert len(ids) == -(-tokens // block_size)
        made.append(Prompt(times[number] if times else number, tokens, 1, block_size, tree.walk(root, ids)))
    return Trace("by hand", made)


def mooncake_line(tokens: int, ids: Sequence[int], timestamp: float = 0) -> str:
    return json.dumps(
        {"timestamp": timestamp, "input_length": tokens, "output_length": 7, "hash_ids": list(ids)},
    )
