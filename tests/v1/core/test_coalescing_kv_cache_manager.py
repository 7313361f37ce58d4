# SPDX-License-Identifier: Apache-2.0
"""Grants: which blocks an export gets, and that a lookup finds what was retained."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.core.probationary_quota import ProbationaryQuota, Reach
from vllm.v1.core.state_retention import POLICIES, WantedState
from vllm_kda_prefill.planning import Engine, Layout

BLOCK = 16


def words(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def cached_prompt(engine: Engine, prompt: int) -> list[int]:
    engine.add("prompt", words(prompt))
    while engine.scheduler.requests:
        engine.step()
    return words(prompt)


def hit_of(engine: Engine, tokens: list[int]) -> int:
    """What vLLM's own lookup returns for a prompt."""
    request = engine.add("probe", tokens)
    engine.scheduler.waiting.remove_request(request)
    del engine.scheduler.requests["probe"]
    return engine.scheduler.kv_cache_manager.get_computed_blocks(request)[1]


class TestReach:
    @given(
        dcp=st.sampled_from([1, 2, 4]),
        mtp_drop=st.sampled_from([(0, False), (3, False), (3, True)]),
        sizes=st.sampled_from([(BLOCK, BLOCK), (BLOCK, BLOCK), (BLOCK, 2 * BLOCK), (2 * BLOCK, BLOCK)]),
        prompt=st.integers(1, 60 * BLOCK),
        interval=st.sampled_from([None, 0]),
    )
    @settings(derandomize=True, max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @example(dcp=1, mtp_drop=(0, False), sizes=(BLOCK, BLOCK), prompt=2 * BLOCK, interval=None)
    def test_every_checkpoint_position_is_what_a_branch_hits(
        self,
        dcp: int,
        mtp_drop: tuple[int, bool],
        sizes: tuple[int, int],
        prompt: int,
        interval: int | None,
        states: Any,
    ) -> None:
        """A request that shares just enough tokens to prove a position's hash, and then leaves, resumes there."""
        mtp, drop = mtp_drop
        assume(sizes[0] <= sizes[1] or dcp > 1)
        layout = Layout(
            attention_block=sizes[0], mamba_block=sizes[1], dcp=dcp, mtp=mtp, block_drop=drop, budget=256,
            max_model_len=4096, retention_interval=interval,
        )  # fmt: skip
        engine = Engine.build(layout)
        retention = engine.scheduler.retention
        tokens = cached_prompt(engine, prompt)
        positions = retention.checkpoint_positions(prompt)
        for position in positions:
            proof = retention.grid.hit_alignment if drop else retention.grid.hash_lookahead
            # The prompt's own end may be kept too, and is hit by who shares all of it.
            shared = max(prompt - 1, position + proof) if position == positions[-1] else position + proof
            branch = tokens[:shared] + words(3 * max(sizes) * dcp, 50_000)
            assert hit_of(engine, branch) == position
        if positions:
            assert hit_of(engine, tokens) == positions[-1]

    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("dcp", [1, 2, 4])
    @pytest.mark.parametrize("mtp, drop", [(0, False), (3, False), (3, True)])
    def test_the_grid_knows_what_a_lookup_can_reach(self, dcp: int, mtp: int, drop: bool, policy: Any) -> None:
        """With a state at every block, the hits of all branches are exactly the reachable positions."""
        prompt = 600
        layout = Layout(
            attention_block=BLOCK, mamba_block=BLOCK, dcp=dcp, mtp=mtp, block_drop=drop, budget=BLOCK, max_seqs=4,
            retention_interval=None,
        )  # fmt: skip
        engine = Engine.build(layout, "coalesced", policy)
        grid = engine.scheduler.retention.grid
        tokens = cached_prompt(engine, prompt)
        hits = {hit_of(engine, tokens[:shared] + words(200, 50_000)) for shared in range(0, prompt + 1)} - {0}
        assert hits == {p for p in range(BLOCK, prompt, BLOCK) if grid.is_reachable(p, prompt)}


class TestGrant:
    def engine(self, num_blocks: int = 40, groups: int = 1) -> tuple[Engine, Any]:
        layout = Layout(
            attention_block=BLOCK, mamba_block=BLOCK, num_blocks=num_blocks, budget=256, mamba_groups=groups
        )
        engine = Engine.build(layout)
        return engine, engine.scheduler.kv_cache_manager

    def fill(self, engine: Engine) -> None:
        """Leave no block without a protected entry."""
        pool = engine.scheduler.kv_cache_manager.block_pool
        blocks = pool.get_new_blocks(pool.get_num_free_blocks())
        for block in blocks:
            pool._insert_block_hash(block.block_id.to_bytes(36, "big"), block, num_tokens=BLOCK)
        pool.free_blocks(blocks)

    def test_a_probationary_state_takes_no_protected_entry(self) -> None:
        engine, manager = self.engine()
        self.fill(engine)
        request = engine.add("a", words(200))
        before = len(manager.block_pool.cached_block_hash_to_block)
        assert manager.grant(request, [WantedState(96, protected=False)]) == ({}, [])
        assert len(manager.block_pool.cached_block_hash_to_block) == before

    def test_a_tail_takes_the_oldest_entry(self) -> None:
        engine, manager = self.engine()
        self.fill(engine)
        oldest = manager.eviction.queue.get_all_free_blocks()[0].block_id
        request = engine.add("a", words(200))
        granted, blocks = manager.grant(request, [WantedState(192, protected=True)])
        assert granted == {192: {1: oldest}}
        assert [block.ref_cnt for block in blocks] == [1]

    def test_shallow_checkpoints_go_without_a_block_first(self) -> None:
        engine, manager = self.engine()
        self.fill(engine)
        pool = manager.block_pool
        pool.evict_blocks({block.block_id for block in manager.eviction.queue.get_all_free_blocks()[:2]})
        request = engine.add("a", words(300))
        wanted = engine.scheduler.retention.wanted(300, 0, 300)[1:]
        granted, _ = manager.grant(request, wanted)
        assert [state.position for state in wanted] == [272, 240, 176]
        assert sorted(granted) == [240, 272]

    def test_only_a_state_kept_out_by_protected_entries_is_lost(self) -> None:
        engine, manager = self.engine()
        request = engine.add("a", words(300))
        lost = [manager.block_pool._get_partial_block_hash(request, position) for position in (96, 240)]
        taken = manager.block_pool.get_new_blocks(manager.block_pool.get_num_free_blocks())
        assert manager.grant(request, [WantedState(96, protected=False)]) == ({}, [])
        manager.block_pool.free_blocks(taken)
        self.fill(engine)
        assert manager.grant(request, [WantedState(240, protected=False)]) == ({}, [])
        assert [manager.eviction.quota.was_probationary(name) for name in lost] == [False, True]

    def test_every_group_gets_a_block_or_none(self) -> None:
        engine, manager = self.engine(groups=3)
        self.fill(engine)
        pool = manager.block_pool
        pool.evict_blocks({block.block_id for block in manager.eviction.queue.get_all_free_blocks()[:5]})
        request = engine.add("a", words(300))
        granted, blocks = manager.grant(request, engine.scheduler.retention.wanted(300, 0, 300)[1:])
        assert {position: sorted(block_ids) for position, block_ids in granted.items()} == {272: [1, 2, 3]}
        assert len(blocks) == 3

    def test_an_older_checkpoint_makes_way_for_a_newer_one(self) -> None:
        engine, manager = self.engine()
        self.fill(engine)
        pool = manager.block_pool
        spare = manager.eviction.queue.get_all_free_blocks()[0]
        pool.evict_blocks({spare.block_id})
        for name, first in (("a", 0), ("b", 1000)):
            request = engine.add(name, words(300, first))
            granted, blocks = manager.grant(request, [WantedState(272, protected=False)])
            assert granted == {272: {1: spare.block_id}}
            pool.free_blocks(blocks)

    def test_what_is_cached_is_not_exported_again(self) -> None:
        engine, manager = self.engine(200)
        cached_prompt(engine, 256)
        request = engine.add("a", words(256))
        assert manager.grant(request, engine.scheduler.retention.wanted(256, 0, 256)) == ({}, [])

    def test_two_requests_of_a_step_never_share_a_block(self) -> None:
        """Only probationary blocks are spare, and the second request must not take what the first just got."""
        engine, manager = self.engine(60)
        self.fill(engine)
        pool = manager.block_pool
        pool.evict_blocks({block.block_id for block in manager.eviction.queue.get_all_free_blocks()[:26]})
        for name, first in (("a", 0), ("b", 1000)):
            engine.add(name, words(128, first))
        plans = engine.scheduler.schedule().kda_prefill_plans
        assert plans.keys() == {"a", "b"}
        block_ids = [block_id for plan in plans.values() for block_id in plan.block_ids[1]]
        assert len(set(block_ids)) == len(block_ids)

    def test_an_export_holds_no_block_after_the_step(self) -> None:
        engine, manager = self.engine(100)
        engine.add("a", words(256), max_tokens=5)
        output = engine.step()
        for block_id in output.kda_prefill_plans["a"].block_ids[1][:-1]:
            assert manager.block_pool.blocks[block_id].ref_cnt == 0
            assert manager.block_pool.blocks[block_id].block_hash is not None

    def test_exports_are_as_recent_as_their_request(self) -> None:
        """Entries that were freed while the request ran are evicted before its states."""
        engine, manager = self.engine(200)
        tokens = cached_prompt(engine, 256)
        pool = manager.block_pool
        cached = [block for block in pool.blocks if block.block_hash is not None]
        pool.evict_blocks({block.block_id for block in cached if get_group_id(block.block_hash) == 1})
        engine.add("b", tokens[:100] + words(150, 50_000), max_tokens=3)
        plan = engine.step().kda_prefill_plans["b"]
        (junction,) = (
            block_id for position, block_id in zip(plan.positions, plan.block_ids[1], strict=True) if position == 96
        )
        while engine.scheduler.requests:
            engine.step()
        assert manager.eviction.queue.get_all_free_blocks()[-1].block_id == junction


class TestLearning:
    """What the quota learns from, and what not."""

    def learnt(self, monkeypatch: pytest.MonkeyPatch) -> list[Reach]:
        seen: list[Reach] = []
        monkeypatch.setattr(ProbationaryQuota, "learn", lambda quota, reach: seen.append(reach))
        monkeypatch.setattr(ProbationaryQuota, "remembers", True)
        return seen

    def test_a_request_that_waits_is_learnt_from_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = Engine.build(Layout(attention_block=BLOCK, mamba_block=BLOCK, budget=512))
        seen = self.learnt(monkeypatch)
        engine.add("a", words(256))
        engine.add("b", words(256))
        steps = []
        while engine.scheduler.requests:
            steps.append([new.req_id for new in engine.step().scheduled_new_reqs])
        assert steps == [["a"], ["b"]]
        assert [reach.hit for reach in seen] == [0, 240]

    @pytest.mark.parametrize("lost, reach", [("checkpoint", (0, 0, 96)), ("tail", (0, 144, 0))])
    def test_what_is_gone_and_would_have_been_hit(self, lost: str, reach: tuple[int, int, int]) -> None:
        """At DCP 2, blocks of 32 tokens: the prompt's tail is inside an attention block."""
        engine = Engine.build(Layout(attention_block=BLOCK, mamba_block=BLOCK, dcp=2, budget=256))
        manager = engine.scheduler.kv_cache_manager
        tokens = cached_prompt(engine, 150)
        states = [block for block in manager.block_pool.blocks if block.block_hash_num_tokens and is_state(block)]
        assert 144 in [block.block_hash_num_tokens for block in states]
        for block in states:
            name = block.block_hash
            if lost == "tail" and block.block_hash_num_tokens == 144:
                manager.eviction.quota.note_protected_evictions([block], held=0)
            if lost == "checkpoint" and block.block_hash_num_tokens == 96:
                manager.eviction.quota.note_lost_state(get_block_hash(name))
        manager.block_pool.evict_blocks({block.block_id for block in states})
        request = engine.add("again", tokens)
        assert manager.eviction.reach(request, 0) == reach

    def test_an_emptied_cache_is_no_lesson(self) -> None:
        engine = Engine.build(Layout(attention_block=BLOCK, mamba_block=BLOCK, budget=256, num_blocks=40))
        for first in range(0, 3000, 1000):
            engine.add(f"{first}", words(300, first))
            while engine.scheduler.requests:
                engine.step()
        quota = engine.scheduler.kv_cache_manager.eviction.quota
        assert quota.remembers
        assert engine.scheduler.reset_prefix_cache()
        assert not quota.remembers


def is_state(block: Any) -> bool:
    return get_group_id(block.block_hash) == 1
