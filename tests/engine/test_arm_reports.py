# SPDX-License-Identifier: Apache-2.0
"""What the engine tests read of an engine: its logs of plans, and the blocks of a state. No GPU is needed."""

from __future__ import annotations

import pytest

from tests.engine.plan_lines import exported, planned
from tests.engine.run_arm import state_blocks
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm_kda_prefill.planning import Engine, Layout
from vllm_kda_prefill.spans import mamba_managers

LOG = """\
(Main pid=1) INFO 12-03 05:12:00 [x.py:7] KDA prefill plan: request 6-9f, query [512, 2048), checkpoints [1024, 1536], \
blocks {0: (42, 33), 1: (43, 21)}
(Worker_TP1_DCP1 pid=3) INFO 12-03 05:12:00 [x.py:7] KDA prefill rows: request 6-9f in row 0, query [512, 2048), \
offsets [512, 1024], blocks {0: [42, 33], 1: [43, 21]}
(Worker_TP0_DCP0 pid=2) INFO 12-03 05:12:00 [x.py:7] KDA prefill rows: request 6-9f in row 0, query [512, 2048), \
offsets [512, 1024], blocks {0: [42, 33], 1: [43, 21]}
"""


def test_ranks_that_export_what_was_planned_are_told_from_others():
    plans = planned(LOG)
    assert plans == [("6-9f", 512, 2048, [1024, 1536], {0: (42, 33), 1: (43, 21)})]
    assert exported(LOG) == {"Worker_TP1_DCP1": plans, "Worker_TP0_DCP0": plans}


@pytest.mark.parametrize(
    "other",
    [("request 6-9f", "request 7-aa"), ("2048)", "2049)"), ("[512, 2", "[511, 2"), ("row 0", "row 1"), ("33]", "34]")],
)
def test_a_rank_that_exports_something_else_shows(other):
    main, second, first = LOG.splitlines()
    ranks = exported("\n".join((main, second.replace(*other), first)))
    assert ranks.get("Worker_TP1_DCP1") != planned(LOG) == ranks["Worker_TP0_DCP0"]


@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_a_states_blocks_are_those_of_the_recurrent_groups(dcp):
    engine = Engine.build(Layout(dcp=dcp, mtp=3), "coalesced")
    engine.add("a", list(range(8192)))
    while engine.scheduler.requests:
        engine.step()
    manager = engine.scheduler.kv_cache_manager
    recurrent = [mamba.kv_cache_group_id for mamba in mamba_managers(manager)]
    blocks = manager.block_pool.blocks
    for position in (4096, 6144, 7680):
        block_ids = state_blocks(engine.scheduler, position)
        assert sorted(get_group_id(blocks[block_id].block_hash) for block_id in block_ids) == sorted(recurrent)
    assert state_blocks(engine.scheduler, 512) == []
    if dcp == 1:  # An attention block ends there too.
        assert sum(block.block_hash_num_tokens == 7680 for block in blocks) > len(recurrent)
