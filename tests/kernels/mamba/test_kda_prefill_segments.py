# SPDX-License-Identifier: Apache-2.0
"""How a batch is cut: into launches of one checkpoint a row, and into the native kernel's chunks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.mamba.reference_launcher import ReferenceLauncher
from vllm.model_executor.layers.mamba.ops.kda_prefill.native import CHUNK_TOKENS, max_chunks
from vllm.model_executor.layers.mamba.ops.kda_prefill.segmented import SegmentedKDAPrefill
from vllm.model_executor.layers.mamba.ops.kda_prefill.segments import plan_segments


def test_four_checkpoints_take_three_launches_of_new_tokens(batch_factory):
    launcher = ReferenceLauncher()
    op = SegmentedKDAPrefill(launcher, num_heads=2, max_num_tokens=512, max_num_seqs=8)
    batch = batch_factory([128], [[64, 96, 112, 16]])
    op.run(batch.inputs, batch.checkpoints)
    assert launcher.tokens == [64, 48, 16]
    launcher.tokens.clear()
    batch = batch_factory([20, 128, 33], [[], [64], []])
    op.run(batch.inputs, batch.checkpoints)
    assert launcher.tokens == [181]


def test_segments_cover_every_token_once():
    lens = [100, 1, 64, 33]
    launches = plan_segments([[16, 32, 48, 96], [], [16, 0, 48], [32]], lens)
    covered = sorted((s.row, t) for segments in launches for s in segments for t in range(s.begin, s.end))
    assert covered == [(row, t) for row, length in enumerate(lens) for t in range(length)]
    assert [len(segments) for segments in launches] == [4, 2, 1]


def test_batch_beyond_the_workspace_is_refused(batch_factory):
    op = SegmentedKDAPrefill(ReferenceLauncher(), num_heads=2, max_num_tokens=64, max_num_seqs=1)
    with pytest.raises(ValueError, match="batch of 1 rows and 65 tokens"):
        op.run(batch_factory([65]).inputs)


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 400), st.lists(st.integers(1, 24), max_size=4, unique=True)),
        min_size=1,
        max_size=6,
    )
)
def test_native_workspace_holds_every_chunk(rows):
    chunks = 0
    for length, cuts in rows:
        bounds = [0, *sorted(16 * cut for cut in cuts if 16 * cut < length), length]
        chunks += sum(-(-(b - a) // CHUNK_TOKENS) for a, b in pairwise(bounds))
    tokens = sum(length for length, _ in rows)
    assert chunks <= max_chunks(tokens, len(rows), checkpoints=True)
    whole = sum(-(-length // CHUNK_TOKENS) for length, _ in rows)
    assert whole <= max_chunks(tokens, len(rows), checkpoints=False)
