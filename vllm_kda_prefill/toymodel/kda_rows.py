# SPDX-License-Identifier: Apache-2.0
"""What the GDN metadata tells a KDA layer, one row at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.gdn_checkpoint import PlannedCheckpointMetadata


@dataclass(frozen=True)
class KDARow:
    """One row of a KDA layer: its place in the batch, and the blocks that it reads and writes.

    Attributes:
        row: Row of the batch.
        block_ids: Blocks of its running state; one for each token of a verifying row, else a single one.
        resumes: Whether there is a state to start from.
        accepted: For a verifying row which of `block_ids` that is, counted from 1.
        exports: Tokens after the row's start -> block id.
    """

    row: int
    block_ids: list[int]
    resumes: bool
    accepted: int | None
    exports: dict[int, int]

    @property
    def offset(self) -> int:
        """How many rows into the window of its first block a resuming row starts."""
        return (self.accepted or 1) - 1

    @property
    def source(self) -> int:
        """Block of the state that a resuming row starts from."""
        return self.block_ids[self.offset]


def kda_rows(num_requests: int, m: GDNAttentionMetadata) -> Iterator[KDARow]:
    """The rows of the verifying kernel, then those of the prefill and decode kernels, as their metadata names
    them."""
    verifying = [False] * num_requests
    if m.spec_sequence_masks_cpu is not None:
        verifying = m.spec_sequence_masks_cpu.tolist()
        assert m.spec_state_indices_tensor is not None
        assert m.num_accepted_tokens is not None
        accepted = m.num_accepted_tokens.tolist()
        for i, row in enumerate(row for row, verifies in enumerate(verifying) if verifies):
            yield KDARow(row, m.spec_state_indices_tensor[i].tolist(), True, accepted[i], {})
    others = [row for row, verifies in enumerate(verifying) if not verifies]
    if not others:
        return
    assert m.non_spec_state_indices_tensor is not None
    block_ids = m.non_spec_state_indices_tensor.tolist()
    resumes = m.has_initial_state.tolist() if m.has_initial_state is not None else [True] * len(others)
    exports: list[dict[int, int]] = [{} for _ in others]
    if m.checkpoint is not None:
        assert isinstance(m.checkpoint, PlannedCheckpointMetadata)
        offsets, targets = m.checkpoint.checkpoint_offsets.tolist(), m.checkpoint.state_indices.tolist()
        pairs = [zip(*row, strict=True) for row in zip(offsets, targets, strict=True)]
        exports = [{offset: block_id for offset, block_id in row if offset and block_id} for row in pairs]
    for i, row in enumerate(others):
        yield KDARow(row, block_ids[i : i + 1], resumes[i], None, exports[i])
