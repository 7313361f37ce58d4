# SPDX-License-Identifier: Apache-2.0
"""The V2 model state that hands each step's plans to the metadata builders, checked against the batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.checkpoint_rows import NOTHING, CheckpointRows, bind_rows
from vllm.v1.attention.backends.gdn_checkpoint import CheckpointedGDNMetadataBuilder
from vllm.v1.core.prefill_plan import PlanLog, PrefillPlan
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.utils import AttentionGroup


class CheckpointedMambaHybridModelState(MambaHybridModelState):
    """`MambaHybridModelState` for layers that export up to four states of a query."""

    _plans: Mapping[str, PrefillPlan] | None = None
    _bound: tuple[list[list[AttentionGroup]], bool] | None = None
    """The attention groups whose builders were last bound, and whether to export nothing or by stock's rule."""

    def set_plans(self, plans: Mapping[str, PrefillPlan]) -> None:
        """Take the plans of the scheduler output that is executed next."""
        self._plans = plans

    def prepare_attn(  # type: ignore[override]  # what this class does not use goes on as it comes
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: list[list[AttentionGroup]],
        kv_cache_config: KVCacheConfig,
        for_capture: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        # A batch that no scheduler output announced (warm-up, capture) has no plans, and consumes none.
        plans, self._plans = self._plans, None
        self._bind_none(attn_groups, announced=plans is not None)
        if plans and not for_capture:
            builders = dict(self._builders(attn_groups))
            rows = bind_rows(
                plans,
                request_ids=input_batch.req_ids,
                num_computed_tokens=input_batch.num_computed_tokens_np,
                num_scheduled_tokens=input_batch.num_scheduled_tokens,
                query_start_loc=input_batch.query_start_loc_np,
                group_ids=builders.keys(),
                num_blocks=kv_cache_config.num_blocks,
            )
            self._log_rows(plans, input_batch.req_ids, rows)
            self._bound = None
            for group_id, group_builders in builders.items():
                for builder in group_builders:
                    builder.bind(rows, group_id)
        return super().prepare_attn(
            input_batch,
            cudagraph_mode,
            block_tables,
            slot_mappings,
            attn_groups,
            kv_cache_config,
            for_capture,
            **kwargs,
        )

    @cached_property
    def _log(self) -> PlanLog:
        return PlanLog()

    def _log_rows(self, plans: Mapping[str, PrefillPlan], request_ids: Sequence[str], rows: CheckpointRows) -> None:
        """Log what this rank exports; all ranks log the same."""
        if not self._log.wants:
            return
        for request_id, plan in plans.items():
            row = request_ids.index(request_id)
            count = len(plan.positions)
            self._log.line(
                "KDA prefill rows: request %s in row %d, query [%d, %d), offsets %s, blocks %s",
                request_id,
                row,
                plan.start,
                plan.end,
                rows.offsets[row, :count].tolist(),
                {group: block_ids[row, :count].tolist() for group, block_ids in rows.block_ids.items()},
            )

    def _bind_none(self, attn_groups: list[list[AttentionGroup]], announced: bool) -> None:
        """Let the builders export nothing, or in a batch that was not announced what stock's rule says.

        Decoding goes through here every step, and its steps are as long as the host takes: what is bound already is
        not bound again.
        """
        if self._bound is not None and self._bound[0] is attn_groups and self._bound[1] == announced:
            return
        self._bound = None
        for group_id, group_builders in self._builders(attn_groups):
            for builder in group_builders:
                builder.bind(NOTHING if announced else None, group_id)
        self._bound = (attn_groups, announced)

    @staticmethod
    def _builders(
        attn_groups: list[list[AttentionGroup]],
    ) -> Iterator[tuple[int, list[CheckpointedGDNMetadataBuilder]]]:
        for group_id, groups in enumerate(attn_groups):
            builders = [group.get_metadata_builder(0) for group in groups]
            checkpointed = [b for b in builders if isinstance(b, CheckpointedGDNMetadataBuilder)]
            if checkpointed:
                yield group_id, checkpointed
