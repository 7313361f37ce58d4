# SPDX-License-Identifier: Apache-2.0
"""Prompts that users of prefix caches reported, reproduced small: what is kept of them, and what a later one finds.

Blocks have 512 tokens and a step has 8,192, unless a test says otherwise. Without fine-grained hits a prompt of `L`
tokens can be resumed at the last multiple of 512 up to `L - 1`, its tail. With `E = tail + 512` the ladder keeps the
states at `E - 512 * 2**k`, lowered to whole attention blocks. Stock keeps the tail alone. With MTP the hash of a block
covers the next token too, so a prefix is shared to a boundary only if the token after it is the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from vllm.v1.request import Request
from vllm_kda_prefill.planning import Arm, Engine, Layout

ARMS: tuple[Arm, ...] = ("stock", "coalesced")


class Served(NamedTuple):
    """A request that ran alone: cached tokens it found, tokens of each of its steps, and the request."""

    hit: int
    spans: list[int]
    request: Request


def words(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def serve(engine: Engine, name: str, tokens: list[int]) -> Served:
    request = engine.add(name, tokens)
    hit, spans = 0, []
    while name in engine.scheduler.requests:
        output = engine.step()
        hit += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        spans += output.num_scheduled_tokens.values()
    return Served(hit, spans, request)


def siblings(layout: Layout, arm: Arm, shared: int, fresh: int, count: int = 3) -> tuple[Engine, list[Served]]:
    """Prompts of the same first `shared` tokens and `fresh` tokens of their own each, one after the other."""
    engine = Engine.build(layout, arm)
    prompts = (words(shared) + words(fresh, 200_000 * number) for number in range(1, count + 1))
    return engine, [serve(engine, f"sibling {number}", prompt) for number, prompt in enumerate(prompts)]


def hits(served: list[Served]) -> list[int]:
    return [one.hit for one in served]


class TestRetentionInterval:
    """Right: with an interval of 2,048, a chunk keeps the state at each multiple of 2,048 that it crosses."""

    def first_chunk(self, arm: Arm, states: Any) -> list[int]:
        # The checkpoints of 32,768 tokens start at 16,384, past the chunk of 10,240: only the interval asks for states.
        engine = Engine.build(Layout(budget=10_240, retention_interval=2048), arm)
        request = engine.add("a", words(32_768))
        assert engine.step().num_scheduled_tokens == {"a": 10_240}
        kept: list[int] = states.retained(engine, request)
        return kept

    def test_a_chunk_across_four_boundaries_keeps_each(self, states: Any) -> None:
        # Four boundaries lie inside the chunk, as many as one query exports; the fifth is its end.
        assert self.first_chunk("coalesced", states) == [2048, 4096, 6144, 8192, 10_240]

    def test_stock_keeps_the_chunks_end_only(self, states: Any) -> None:
        # Stock has a state where a query ends and nowhere else.
        assert self.first_chunk("stock", states) == [10_240]


class TestWholeBlocks:
    """Right: a prompt of about k * 512 tokens is resumed at its tail, also once MTP has written past it."""

    @pytest.mark.parametrize("past", [-3, -1, 0, 1, 3])
    @pytest.mark.parametrize("blocks", [1, 2, 8, 16])
    @pytest.mark.parametrize("arm", ARMS)
    def test_a_repeat_resumes_at_the_tail(self, arm: Arm, blocks: int, past: int, states: Any) -> None:
        # A boundary needs one token behind it: k * 512 tokens, and fewer, reach the boundary before only.
        worker = states.ShadowWorker(Engine.build(Layout(mtp=3), arm))
        tail = 512 * (blocks if past > 0 else blocks - 1)
        found = []
        for name in "ab":
            worker.add(name, words(512 * blocks + past), max_tokens=9)
            answer = worker.step()
            found += [new.num_computed_tokens for new in answer.output.scheduled_new_reqs]
            worker.deliver(answer)
            worker.run()
        assert found == [0, tail]

    @pytest.mark.parametrize(
        "tokens, kept",
        [
            # E = 8,192.
            (8189, [4096, 6144, 7168, 7680]),
            (8191, [4096, 6144, 7168, 7680]),
            (8192, [4096, 6144, 7168, 7680]),
            # E = 8,704: one block more, and one state.
            (8193, [512, 4608, 6656, 7680, 8192]),
            (8195, [512, 4608, 6656, 7680, 8192]),
        ],
    )
    def test_the_ladder_moves_with_the_tail(self, tokens: int, kept: list[int], states: Any) -> None:
        engine = Engine.build(Layout(mtp=3))
        assert states.retained(engine, serve(engine, "a", words(tokens)).request) == kept


class TestSharedPrefixOf16384:
    """Right: TP4, DCP4, MTP3, blocks of 2,048 tokens: siblings share 16,384 tokens and resume at 15,872.

    The attention block that ends at 16,384 is hashed with token 16,384, the first that differs. Stock resumes at the
    block before, 14,336; here the block is also cached under 15,872, as on one rank.
    """

    layout = Layout(dcp=4, mtp=3)

    @pytest.mark.parametrize("tail, checkpoint", [(200, 15_872), (1000, 15_360), (2000, 14_336), (3000, 15_360)])
    def test_siblings_resume_at_a_checkpoint_then_the_junction(self, tail: int, checkpoint: int, states: Any) -> None:
        # The checkpoints are E - 1,024, E - 2,048 or E - 4,096 of each of these prompts.
        engine, served = siblings(self.layout, "coalesced", 16_384, tail)
        assert hits(served) == [0, checkpoint, 15_872]
        assert [one.spans for one in served[1:]] == [[16_384 + tail - checkpoint], [512 + tail]]
        assert checkpoint in states.retained(engine, served[0].request)

    @pytest.mark.parametrize("tail", [200, 1000, 2000, 3000])
    def test_stock_finds_it_at_the_third(self, tail: int) -> None:
        # The second computes everything, and stops at the junction to keep its state.
        _, served = siblings(self.layout, "stock", 16_384, tail)
        assert hits(served) == [0, 0, 14_336]
        assert served[1].spans == [8192, 6144, 2048 + tail]


class TestChainsInAFullCache:
    """Right: a fork at 8,192 costs the chain that was not used for longest, and no other."""

    @pytest.mark.parametrize("mtp, junction", [(0, 8192), (3, 7680)])
    @pytest.mark.parametrize("arm", ARMS)
    def test_a_fork_pushes_out_the_oldest_chain_only(self, arm: Arm, mtp: int, junction: int) -> None:
        # 3 chains are 3 * 64 attention blocks and 3 tails, of 201 blocks; a fork needs 20 and more.
        engine = Engine.build(Layout(mtp=mtp, num_blocks=202), arm)
        chains = [words(32_768, 100_000 * number) for number in range(1, 4)]
        for number, chain in enumerate(chains):
            serve(engine, f"chain {number}", chain)
        forks = [
            serve(engine, f"fork {number}", chains[2][:8192] + words(2000, 900_000 + 10_000 * number))
            for number in range(3)
        ]
        # The ladder of 32,768 tokens starts at 16,384, so the first fork finds no state and keeps the junction's.
        assert hits(forks) == [0, junction, junction]
        again = [serve(engine, f"again {n}", chains[n] + words(300, 950_000)).hit for n in (2, 1, 0)]
        assert again == [32_256, 32_256, 0]

    @pytest.mark.parametrize("arm, spans", [("stock", [8192, 2000]), ("coalesced", [8192, 2000])])
    def test_the_first_fork_runs_whole_budgets(self, arm: Arm, spans: list[int]) -> None:
        # The junction lies on the end of the first budget, so neither arm needs another stop.
        engine = Engine.build(Layout(num_blocks=202), arm)
        chain = words(32_768)
        serve(engine, "chain", chain)
        assert serve(engine, "fork", chain[:8192] + words(2000, 900_000)).spans == spans


class TestSharedLengths:
    """Right: 5,120 shared tokens are ten blocks; with MTP the tenth is shared from 5,121 tokens on."""

    @pytest.mark.parametrize(
        "dcp, mtp, shared, junction",
        [
            (1, 0, 5120, 5120),
            (1, 0, 5121, 5120),
            (1, 3, 5120, 4608),
            (1, 3, 5121, 5120),
            (4, 0, 5120, 5120),
            (4, 3, 5120, 4608),
            (4, 3, 5121, 5120),
        ],
    )
    @pytest.mark.parametrize("arm", ARMS)
    def test_the_third_resumes_at_the_junction(
        self, arm: Arm, dcp: int, mtp: int, shared: int, junction: int, states: Any
    ) -> None:
        if arm == "stock" and dcp == 4:
            # Attention blocks of 2,048 tokens: two are shared, whatever the token after the tenth 512.
            junction = 4096
        engine, served = siblings(Layout(dcp=dcp, mtp=mtp), arm, shared, 4000)
        # What the second finds of the first is a checkpoint below the junction: of 9,120 tokens E - 8,192 = 1,024.
        # A checkpoint at the junction itself (E - 4,096 = 5,120) is found at once.
        checkpoint = junction if junction != 4608 else 1024
        assert hits(served) == [0, checkpoint if arm == "coalesced" else 0, junction]
        assert junction in states.retained(engine, served[1].request)

    def test_a_junction_costs_no_query_of_its_own(self) -> None:
        # Resumed at the checkpoint 1,024, the second exports 4,608 inside the one query that runs to its end.
        _, served = siblings(Layout(mtp=3), "coalesced", 5120, 4000)
        assert served[1].spans == [9120 - 1024]
        _, served = siblings(Layout(mtp=3), "stock", 5120, 4000)
        assert served[1].spans == [4608, 9120 - 4608]


class TestRenderedAnew:
    """Right: each turn keeps a history and renders the rest anew; from the third on it resumes where they part."""

    @pytest.mark.parametrize(
        "tokens, fresh, first, junction",
        [
            # Leaves at 8,064: the block before is the tail of the first turn, on stock as well.
            (8192, 128, 7680, 7680),
            # Leaves at 3,200, below the ladder's 4,096.
            (8192, 4992, 0, 3072),
            # Leaves at 11,392: the ladder has 12,288 and 8,192.
            (16_384, 4992, 8192, 11_264),
            # Leaves at 26,432, below the ladder's 65,536.
            (131_072, 104_640, 0, 26_112),
        ],
    )
    def test_turns_resume_where_they_part(
        self, tokens: int, fresh: int, first: int, junction: int, states: Any
    ) -> None:
        for arm in ARMS:
            engine, turns = siblings(Layout(mtp=3), arm, tokens - fresh, fresh, count=4)
            # Stock's second turn finds the first's tail or nothing.
            second = first if arm == "coalesced" or first == junction else 0
            assert hits(turns) == [0, second, junction, junction], arm
            assert all(junction in states.retained(engine, turn.request) for turn in turns[1:]), arm

    def test_a_turn_that_parts_early_is_one_query_a_budget(self) -> None:
        # 131,072 tokens are 16 budgets; stock stops once more, at the junction.
        layout = Layout(mtp=3)
        _, turns = siblings(layout, "coalesced", 26_432, 104_640, count=2)
        assert turns[1].spans == [8192] * 16
        _, turns = siblings(layout, "stock", 26_432, 104_640, count=2)
        assert turns[1].spans == [8192] * 3 + [26_112 - 3 * 8192] + [8192] * 12 + [6656]


class TestPreempted:
    """Right: a preempted request finds its own states when it resumes, and answers as if nothing had happened."""

    @pytest.mark.parametrize(
        "arm, interval, resumed",
        [
            # The ladder of 16,384 tokens starts at 8,192, where the first chunk ended.
            ("coalesced", 0, 8192),
            # Stock keeps a chunk's end under dense retention only.
            ("stock", 0, 0),
            ("stock", None, 8192),
            ("coalesced", None, 8192),
        ],
    )
    def test_it_resumes_at_its_own_state(self, arm: Arm, interval: int | None, resumed: int, states: Any) -> None:
        # Of 43 blocks 4 urgent requests have 8. The prompt fits, 32 blocks and states, and takes 17 for its first half.
        # The urgent ones then grow by 8, past their 512th token, and 10 are left for the second half, which needs 17.
        layout = Layout(budget=8704, num_blocks=44, scheduling="priority", retention_interval=interval)
        worker = states.ShadowWorker(Engine.build(layout, arm))
        for number in range(4):
            worker.add(f"urgent {number}", words(511, 100_000 * number + 100_000), max_tokens=6)
        worker.deliver(worker.step())
        victim = worker.add("victim", words(16_384), max_tokens=3, priority=5)
        admitted = []
        while worker.scheduler.requests:
            answer = worker.step()
            admitted += [new.num_computed_tokens for new in answer.output.scheduled_new_reqs]
            worker.deliver(answer)
        assert victim.num_preemptions == 1
        assert admitted == [0, resumed]
        assert victim.num_output_tokens == 3
