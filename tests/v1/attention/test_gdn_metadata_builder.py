# SPDX-License-Identifier: Apache-2.0
"""GDN metadata carries plans in packed request order, and stock's checkpoint where no plans are bound."""

from typing import Any

import numpy as np
import pytest
import torch

from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.checkpoint_rows import bind_rows
from vllm.v1.attention.backends.gdn_checkpoint import CheckpointedGDNMetadataBuilder
from vllm.v1.core.prefill_plan import PlanMismatchError, PrefillPlan
from vllm_kda_prefill.planning import Layout

BLOCKS = 1000
LONG = PrefillPlan(0, 8192, (4096, 6144, 7168, 7680), {1: (900, 901, 902, 903), 2: (910, 911, 912, 913)})
SHORT = PrefillPlan(1024, 2048, (1536,), {1: (920,), 2: (921,)})


@pytest.fixture(scope="module", params=[0, 3], ids=["no-mtp", "mtp3"])
def builders(request):
    """The builders of two Mamba groups."""
    layout = Layout(mtp=request.param, mamba_groups=2)
    config = layout.vllm_config()
    config.cache_config.hash_block_size = config.cache_config.cache_hit_alignment_tokens = 512
    groups: list[Any] = layout.kv_cache_config().kv_cache_groups
    return [
        CheckpointedGDNMetadataBuilder(groups[i].kv_cache_spec, groups[i].layer_names, config, torch.device("cpu"))
        for i in (1, 2)
    ]


class Batch:
    """A packed batch of requests `(id, computed, scheduled, draft tokens or -1)`."""

    def __init__(self, *rows):
        self.ids = [row[0] for row in rows]
        self.computed = np.array([row[1] for row in rows])
        self.scheduled = np.array([row[2] for row in rows])
        self.drafts = torch.tensor([row[3] for row in rows], dtype=torch.int32)
        self.starts = np.concatenate([[0], np.cumsum(self.scheduled)])
        self.table = torch.arange(len(rows) * 40, dtype=torch.int32).view(len(rows), 40) + 1

    def common(self, table=None):
        starts = torch.tensor(self.starts, dtype=torch.int32)
        lengths = torch.tensor(self.computed + self.scheduled, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths,
            max_seq_len=int(lengths.max()),
            num_reqs=len(self.ids),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(self.scheduled.max()),
            block_table_tensor=self.table if table is None else table,
            slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
            is_prefilling=(self.drafts < 0) & torch.from_numpy(self.scheduled > 1),
        )

    def bind(self, builders, plans):
        rows = bind_rows(
            plans,
            request_ids=self.ids,
            num_computed_tokens=self.computed,
            num_scheduled_tokens=self.scheduled,
            query_start_loc=self.starts,
            group_ids=(1, 2),
            num_blocks=BLOCKS,
        )
        for group, builder in zip((1, 2), builders, strict=True):
            builder.bind(rows, group)

    def build(self, builder):
        extra = {}
        if builder.use_spec_decode:
            extra = {
                "num_accepted_tokens": torch.ones(len(self.ids), dtype=torch.int32),
                "num_decode_draft_tokens_cpu": self.drafts,
            }
        return builder.build(0, self.common(), **extra)


def check(checkpoint, offsets, state_indices):
    assert checkpoint.checkpoint_offsets.dtype == checkpoint.state_indices.dtype == torch.int32
    assert checkpoint.checkpoint_offsets.tolist() == checkpoint.host_offsets == offsets
    assert checkpoint.state_indices.tolist() == checkpoint.host_state_indices == state_indices


def test_pure_prefill(builders):
    batch = Batch(("short", 1024, 1024, -1), ("long", 0, 8192, -1))
    batch.bind(builders, {"long": LONG, "short": SHORT})
    metadata = batch.build(builders[0])
    check(
        metadata.checkpoint,
        [[512, 0, 0, 0], [4096, 6144, 7168, 7680]],
        [[920, 0, 0, 0], [900, 901, 902, 903]],
    )
    assert metadata.checkpoint.host_query_lens == [1024, 8192]


@pytest.mark.parametrize("builders", [0], indirect=True)
def test_prefill_among_decodes_keeps_a_row_for_every_request(builders):
    batch = Batch(("a", 700, 1, -1), ("b", 90, 1, -1), ("long", 0, 8192, -1))
    batch.bind(builders, {"long": LONG})
    metadata = batch.build(builders[0])
    check(
        metadata.checkpoint,
        [[0] * 4, [0] * 4, [4096, 6144, 7168, 7680]],
        [[0] * 4, [0] * 4, [900, 901, 902, 903]],
    )
    assert metadata.checkpoint.checkpoint_offsets.shape[0] == metadata.non_spec_query_start_loc.shape[0] - 1


@pytest.mark.parametrize("builders", [3], indirect=True)
def test_prefill_among_draft_verify_rows(builders):
    batch = Batch(("v", 700, 4, 3), ("short", 1024, 1024, -1), ("w", 90, 4, 3), ("long", 0, 8192, -1), ("x", 33, 4, 3))
    batch.bind(builders, {"long": LONG, "short": SHORT})
    metadata = batch.build(builders[0])
    check(
        metadata.checkpoint,
        [[512, 0, 0, 0], [4096, 6144, 7168, 7680]],
        [[920, 0, 0, 0], [900, 901, 902, 903]],
    )
    assert metadata.checkpoint.batch_rows == [1, 3]
    assert metadata.non_spec_query_start_loc.tolist() == [0, 1024, 9216]


@pytest.mark.parametrize("builders", [3], indirect=True)
def test_a_plan_on_a_draft_verify_row_is_refused(builders):
    # A row of 512 tokens that the worker takes for a verify row although a plan says prefill.
    batch = Batch(("short", 1024, 1024, 3), ("long", 0, 8192, -1))
    batch.bind(builders, {"short": SHORT})
    with pytest.raises(PlanMismatchError, match=r"batch rows \[0\] have a KDA prefill plan"):
        batch.build(builders[0])


def test_a_second_group_gets_its_own_blocks(builders):
    batch = Batch(("short", 1024, 1024, -1), ("long", 0, 8192, -1))
    batch.bind(builders, {"long": LONG, "short": SHORT})
    first = batch.build(builders[0])
    # Only the V2 runner's CUDA path shares metadata between groups; it precomputes the aligned state columns.
    builders[1].mamba_aligned_state_indices = batch.table[:, :4] + 500
    second = builders[1].update_block_table(first, batch.table + 500, torch.zeros(9216, dtype=torch.int64))
    check(
        second.checkpoint,
        [[512, 0, 0, 0], [4096, 6144, 7168, 7680]],
        [[921, 0, 0, 0], [910, 911, 912, 913]],
    )
    check(first.checkpoint, second.checkpoint.host_offsets, [[920, 0, 0, 0], [900, 901, 902, 903]])
    del builders[1].mamba_aligned_state_indices


def test_a_planned_batch_exports_nothing_for_rows_without_a_plan(builders):
    batch = Batch(("short", 1024, 1024, -1), ("long", 0, 8192, -1))
    batch.bind(builders, {"short": SHORT})
    check(batch.build(builders[0]).checkpoint, [[512, 0, 0, 0], [0] * 4], [[920, 0, 0, 0], [0] * 4])
    batch.bind(builders, {})
    assert batch.build(builders[0]).checkpoint is None


def test_without_bound_plans_a_row_has_stocks_checkpoint(builders):
    batch = Batch(("long", 0, 8192, -1), ("aligned", 1024, 1030, -1))
    for group, builder in zip((1, 2), builders, strict=True):
        builder.bind(None, group)
    checkpoint = batch.build(builders[0]).checkpoint
    # Stock's block is in the block table, two columns before the end of the query.
    assert checkpoint.checkpoint_offsets.tolist() == [[7680, 0, 0, 0], [1024, 0, 0, 0]]
    assert checkpoint.state_indices.tolist() == [
        [int(batch.table[0, 14]), 0, 0, 0],
        [int(batch.table[1, 3]), 0, 0, 0],
    ]
    assert checkpoint.host_offsets == [[7680, 0, 0, 0], [1024, 0, 0, 0]]
    assert checkpoint.host_state_indices is None
    builders[1].mamba_aligned_state_indices = batch.table[:, :4]
    other = builders[1].update_block_table(batch.build(builders[0]), batch.table + 500, torch.zeros(1))
    assert other.checkpoint.state_indices.tolist() == [
        [int(batch.table[0, 14]) + 500, 0, 0, 0],
        [int(batch.table[1, 3]) + 500, 0, 0, 0],
    ]
    del builders[1].mamba_aligned_state_indices
