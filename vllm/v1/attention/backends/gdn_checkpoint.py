# SPDX-License-Identifier: Apache-2.0
"""GDN metadata with up to four checkpoints a row, taken from plans instead of derived from lengths."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.checkpoint import (
    MambaPrefillCheckpointBuilder,
    MambaPrefillCheckpointMetadata,
)
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.checkpoint_rows import CheckpointRows
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)
from vllm.v1.core.prefill_plan import MAX_CHECKPOINTS, PlanMismatchError
from vllm.v1.kv_cache_interface import MambaSpec


@dataclass
class PlannedCheckpointMetadata(MambaPrefillCheckpointMetadata):
    """Checkpoints of the rows that the prefill kernel runs, in packed order; the kernel's `CheckpointMetadata`.

    `checkpoint_offsets` and `state_indices` (the ids of the blocks that the states go to) are int32 `[rows, 4]` on
    the device; an entry is inactive where either is 0. Offsets count from the row's query start.

    Attributes:
        batch_rows: Each row's place in the whole batch.
        host_offsets: The offsets on the host, to validate them and to lay out launches without a sync.
        host_state_indices: The state indices on the host; None where stock's rule gave the checkpoint, whose block
            only the block table on the device names.
        host_query_lens: Tokens of each row.
        validated_for: The batch that the kernel found this right for: rows, states of the pool and tokens.
    """

    batch_rows: list[int] = field(default_factory=list)
    host_offsets: list[list[int]] = field(default_factory=list)
    host_state_indices: list[list[int]] | None = None
    host_query_lens: list[int] = field(default_factory=list)
    validated_for: tuple[int, int, int] | None = field(default=None, init=False, compare=False)

    def regather_state_indices(self, block_table: torch.Tensor) -> PlannedCheckpointMetadata:
        """This metadata for another KV cache group's block table. Planned blocks are not looked up in one: the
        other group's builder puts them in."""
        if self.block_cols is None:
            return self
        stock = super().regather_state_indices(block_table)
        return replace(self, state_indices=_widen(stock.state_indices))


def _widen(column: torch.Tensor) -> torch.Tensor:
    """`[rows]` -> `[rows, 4]`, the column first and zeros behind it."""
    return torch.nn.functional.pad(column.reshape(-1, 1), (0, MAX_CHECKPOINTS - 1))


class PlannedCheckpointBuilder:
    """Takes the place of a metadata builder's `MambaPrefillCheckpointBuilder`.

    While rows are bound, they alone decide what is exported. Without, as in a warm-up batch or under a model state
    that binds no plans, a row's one checkpoint is the one that stock derives.

    Attributes:
        stock: Stock's builder.
        rows: What the next batch exports; None for stock's rule.
        group_id: This builder's KV cache group.
    """

    def __init__(self, stock: MambaPrefillCheckpointBuilder) -> None:
        self.stock = stock
        self.rows: CheckpointRows | None = None
        self.group_id = 0

    def build(self, m: CommonAttentionMetadata, request_rows: list[int]) -> PlannedCheckpointMetadata | None:
        """Checkpoints of the batch rows `request_rows`; None where they export nothing.

        Raises:
            PlanMismatchError: A row with a plan is not among them.
        """
        if self.rows is None:
            return self._derived(m, request_rows)
        planned = set(np.flatnonzero(self.rows.offsets.any(axis=1)).tolist())
        if not planned:
            return None
        if not planned <= set(request_rows):
            raise PlanMismatchError(
                f"batch rows {sorted(planned - set(request_rows))} have a KDA prefill plan but are no prefill rows"
            )
        offsets = self.rows.offsets[request_rows]
        state_indices = self.rows.block_ids[self.group_id][request_rows]
        device = m.query_start_loc.device
        return PlannedCheckpointMetadata(
            checkpoint_offsets=async_tensor_h2d(offsets, device=device),
            state_indices=async_tensor_h2d(state_indices, device=device),
            batch_rows=request_rows,
            host_offsets=offsets.tolist(),
            host_state_indices=state_indices.tolist(),
            host_query_lens=np.diff(m.query_start_loc_cpu.numpy())[request_rows].tolist(),
        )

    def for_this_group(self, checkpoint: PlannedCheckpointMetadata) -> PlannedCheckpointMetadata:
        """The checkpoints another group's builder made for the same batch, with this group's blocks."""
        if self.rows is None:
            return checkpoint
        state_indices = self.rows.block_ids[self.group_id][checkpoint.batch_rows]
        return replace(
            checkpoint,
            state_indices=async_tensor_h2d(state_indices, device=checkpoint.state_indices.device),
            host_state_indices=state_indices.tolist(),
        )

    def _derived(self, m: CommonAttentionMetadata, request_rows: list[int]) -> PlannedCheckpointMetadata | None:
        single = self.stock.build(m, request_rows)
        if single is None:
            return None
        assert single.offsets is not None
        assert single.query_lens is not None
        return PlannedCheckpointMetadata(
            checkpoint_offsets=_widen(single.checkpoint_offsets),
            state_indices=_widen(single.state_indices),
            request_rows=single.request_rows,
            block_cols=single.block_cols,
            batch_rows=request_rows,
            host_offsets=[[offset, *[0] * (MAX_CHECKPOINTS - 1)] for offset in single.offsets],
            host_query_lens=single.query_lens,
        )


class CheckpointedGDNMetadataBuilder(GDNAttentionMetadataBuilder):
    """`GDNAttentionMetadataBuilder` whose `checkpoint` is a `PlannedCheckpointMetadata`."""

    checkpoint_builder: PlannedCheckpointBuilder  # type: ignore[assignment]

    def __init__(
        self, kv_cache_spec: MambaSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        stock: Any = self.checkpoint_builder
        self.checkpoint_builder = PlannedCheckpointBuilder(stock)
        # Stock shares one group's metadata with the next for its own class only, since a subclass may hold
        # more that differs by group. This one does not: `update_block_table` below puts in the group's blocks.
        self.supports_update_block_table = vllm_config.use_v2_model_runner and device.type == "cuda"
        if self.supports_update_block_table:
            self.mamba_aligned_state_indices: torch.Tensor | None = None

    def bind(self, rows: CheckpointRows | None, group_id: int) -> None:
        """Set the checkpoints of the next batch; None goes back to stock's rule.

        Args:
            rows: What the batch exports.
            group_id: The KV cache group that this builder is for.
        """
        self.checkpoint_builder.rows = rows
        self.checkpoint_builder.group_id = group_id

    def update_block_table(
        self, metadata: GDNAttentionMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> GDNAttentionMetadata:
        updated = super().update_block_table(metadata, blk_table, slot_mapping)
        if updated.checkpoint is None:
            return updated
        assert isinstance(updated.checkpoint, PlannedCheckpointMetadata)
        return replace(updated, checkpoint=self.checkpoint_builder.for_this_group(updated.checkpoint))


class CheckpointedGDNBackend(GDNAttentionBackend):
    """`GDNAttentionBackend` with the builder above."""

    @staticmethod
    def get_name() -> str:
        return "GDN_ATTN_CHECKPOINTED"

    @staticmethod
    def get_builder_cls() -> type[CheckpointedGDNMetadataBuilder]:
        return CheckpointedGDNMetadataBuilder
