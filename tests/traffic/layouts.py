# SPDX-License-Identifier: Apache-2.0
"""Engines that hostile traffic runs on, as Hypothesis strategies.

Each strategy takes the attention block sizes to choose from, in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from vllm_kda_prefill.planning import Layout

BLOCK = 32
MAX_MODEL_LEN = 4096
REAL_BLOCK = 512
LONGEST_REAL = 40_000


@st.composite
def layouts(draw: st.DrawFn, attention_blocks: Sequence[int]) -> Layout:
    """Engines with Mamba blocks of 32 tokens: everything is a sixteenth of its real size.

    Attention blocks wider than these are refused on one rank.
    """
    mtp = draw(st.sampled_from((0, 3)))
    attention = draw(st.sampled_from(attention_blocks))
    dcp = draw(st.sampled_from((1, 2, 4) if attention <= BLOCK else (2, 4)))
    scheduler_block = max(attention * dcp, BLOCK)
    return Layout(
        attention_block=attention,
        mamba_block=BLOCK,
        dcp=dcp,
        mtp=mtp,
        budget=draw(st.sampled_from((64, 160, 512))),
        num_blocks=draw(st.sampled_from((28, 44, 80, 300))),
        mamba_groups=draw(st.sampled_from((1, 2))),
        retention_interval=draw(st.sampled_from((0, 0, None, None, scheduler_block, 2 * scheduler_block))),
        block_drop=draw(st.booleans()) and mtp > 0,
        max_seqs=draw(st.sampled_from((3, 16))),
        max_model_len=MAX_MODEL_LEN,
        long_prefill_threshold=draw(st.sampled_from((0, 0, 96))),
        scheduling=draw(st.sampled_from(("fcfs", "priority"))),
    )


@st.composite
def crowded_layouts(draw: st.DrawFn, attention_blocks: Sequence[int]) -> Layout:
    """Engines where two requests fight for blocks, in short chunks and by priority."""
    return Layout(
        attention_block=BLOCK,
        mamba_block=BLOCK,
        budget=128,
        num_blocks=draw(st.sampled_from((13, 17))),
        max_seqs=8,
        max_model_len=MAX_MODEL_LEN,
        long_prefill_threshold=BLOCK,
        scheduling="priority",
    )


@st.composite
def crowded_wide_layouts(draw: st.DrawFn, attention_blocks: Sequence[int]) -> Layout:
    """The same with several states an attention block, so that a preempted chunk may begin and end inside one."""
    return Layout(
        attention_block=BLOCK,
        mamba_block=BLOCK,
        dcp=draw(st.sampled_from((2, 4))),
        mtp=draw(st.sampled_from((0, 0, 3))),
        budget=128,
        num_blocks=draw(st.sampled_from((13, 16))),
        max_seqs=8,
        max_model_len=MAX_MODEL_LEN,
        long_prefill_threshold=draw(st.sampled_from((BLOCK, 2 * BLOCK))),
        scheduling="priority",
    )


@st.composite
def wide_layouts(draw: st.DrawFn, attention_blocks: Sequence[int]) -> Layout:
    """Engines whose attention blocks hold several states, so that most hits copy a block."""
    return Layout(
        attention_block=BLOCK,
        mamba_block=BLOCK,
        dcp=4,
        mtp=draw(st.sampled_from((0, 3))),
        budget=1024,
        num_blocks=draw(st.sampled_from((40, 60))),
        max_seqs=8,
        max_model_len=MAX_MODEL_LEN,
    )


@st.composite
def fine_layouts(draw: st.DrawFn, attention_blocks: Sequence[int]) -> Layout:
    """Engines with two attention blocks a Mamba block, where chunks and hits may end inside the latter."""
    return Layout(
        attention_block=BLOCK // 2,
        mamba_block=BLOCK,
        mtp=draw(st.sampled_from((0, 3))),
        budget=draw(st.sampled_from((80, 528))),
        num_blocks=draw(st.sampled_from((80, 300))),
        mamba_groups=draw(st.sampled_from((1, 2))),
        retention_interval=None,
        max_seqs=4,
        max_model_len=MAX_MODEL_LEN,
        long_prefill_threshold=draw(st.sampled_from((0, 3 * BLOCK // 2))),
    )


@st.composite
def real_size_layouts(draw: st.DrawFn, attention_blocks: Sequence[int]) -> Layout:
    """Engines of the real sizes, with pools that hold one prompt of the longest and little more."""
    dcp = draw(st.sampled_from((1, 2, 4)))
    return Layout(
        attention_block=REAL_BLOCK,
        mamba_block=REAL_BLOCK,
        dcp=dcp,
        mtp=draw(st.sampled_from((3, 0))),
        budget=8192,
        num_blocks=LONGEST_REAL // (REAL_BLOCK * dcp) + draw(st.sampled_from((24, 60))),
        mamba_groups=draw(st.sampled_from((1, 2))),
        retention_interval=draw(st.sampled_from((0, None))),
        max_seqs=8,
        max_model_len=65536,
    )
