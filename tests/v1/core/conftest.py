# SPDX-License-Identifier: Apache-2.0
"""A worker made of labels, and short ways to drive vLLM's scheduler, shared by the tests of this folder.

`ShadowWorker` executes scheduler outputs like a GPU worker would, but a page holds labels instead of numbers: the
label of a state or of a token's KV is a hash of all tokens before it. After every step each entry of the prefix
cache must lead to a page with exactly the labels its hash promises.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.core.prefill_plan import PrefillPlan
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.core.tiered_free_queue import Tier, TieredFreeQueue
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm_kda_prefill.planning import Engine

Labels = list[int]


def output_token(seed: int, position: int) -> int:
    """The token that greedy decoding of a request would put at a position, whatever happened before."""
    return hash((seed, position)) % 50_000 + 1000


@dataclass
class Row:
    """What the worker knows of a request: its block table, and how many of its tokens are computed."""

    table: list[list[int]]
    computed: int
    seed: int
    tokens: list[int]
    labels: Labels = field(default_factory=lambda: [0])
    ran_drafts: bool = False

    def label(self, num_tokens: int) -> int:
        """Label of the state after `num_tokens` tokens."""
        while len(self.tokens) < num_tokens:
            self.tokens.append(output_token(self.seed, len(self.tokens)))
        while len(self.labels) <= num_tokens:
            self.labels.append(hash((self.labels[-1], self.tokens[len(self.labels) - 1])))
        return self.labels[num_tokens]


@dataclass
class Answer:
    """A step's result on its way back to the scheduler."""

    output: SchedulerOutput
    sampled: dict[str, list[int]]


class Fault(AssertionError):
    """The scheduler asked for something that corrupts a state or the prefix cache."""


class ShadowWorker:
    """Executes steps in order, as a GPU stream does, and checks what they read, write and publish."""

    def __init__(self, engine: Engine, seed: int = 0, checked: bool = True) -> None:
        self.engine = engine
        self.scheduler: Scheduler = engine.scheduler
        self.checked = checked
        self.rng = random.Random(seed)
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        self.managers = managers
        self.mamba = [g for g, manager in enumerate(managers) if isinstance(manager, MambaManager)]
        cacheable = {g for g, manager in enumerate(managers) if manager.kv_cache_spec.prefix_cacheable}
        self.attention = sorted(cacheable - set(self.mamba))
        self.state: dict[int, int] = {}
        self.kv: dict[int, dict[int, int]] = {}
        self.rows: dict[str, Row] = {}
        self.requests: dict[str, Request] = {}
        self.expected: dict[bytes, tuple[int, str]] = {}
        self._reference: dict[str, Row] = {}
        self._known_hashes: dict[str, int] = {}
        self.plans: list[tuple[str, PrefillPlan]] = []
        self.plans_are_sent = False
        self.steps = 0
        self.aliased_copies = 0

    # Driving.

    def add(self, request_id: str, tokens: list[int], max_tokens: int = 1, priority: int = 0) -> Request:
        request = self.engine.add(request_id, list(tokens), max_tokens, priority)
        self.requests[request_id] = request
        return request

    def step(self) -> Answer:
        """Schedule a step and execute it; `deliver` its answer once, later than earlier ones."""
        output = self.scheduler.schedule()
        answer = self._execute(output)
        self.steps += 1
        if self.checked:
            self.check_pool()
            self.check_cache()
        return answer

    def deliver(self, answer: Answer) -> None:
        """Hand a step's sampled tokens back, and offer draft tokens where the scheduler wants them."""
        request_ids = list(answer.output.num_scheduled_tokens)
        self.scheduler.update_from_output(
            answer.output,
            ModelRunnerOutput(
                req_ids=request_ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
                sampled_token_ids=[answer.sampled[request_id] for request_id in request_ids],
            ),
        )
        if self.engine.mtp and not self.scheduler.scheduler_config.async_scheduling:
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(request_ids, [[7] * self.engine.mtp for _ in request_ids])
            )
        if self.checked:
            self.check_pool()
            self.check_cache()

    def run(self, max_steps: int = 10_000) -> None:
        """Step and deliver until no request is left."""
        for _ in range(max_steps):
            if not self.scheduler.requests:
                return
            self.deliver(self.step())
        raise Fault(f"requests {list(self.scheduler.requests)} are still there after {max_steps} steps")

    # Executing.

    def _execute(self, output: SchedulerOutput) -> Answer:
        for request_id in output.finished_req_ids | (output.preempted_req_ids or set()):
            self.rows.pop(request_id, None)
        self._admit(output)
        touched = self._copy(output)
        plans: dict[str, PrefillPlan] = getattr(output, "kda_prefill_plans", {})
        self.plans_are_sent = hasattr(output, "kda_prefill_plans")
        unknown = plans.keys() - output.num_scheduled_tokens.keys()
        if unknown:
            raise Fault(f"plans of requests {unknown}, which the step does not run")
        read: dict[int, str] = {}
        written: dict[int, str] = {}
        starts = {request_id: self.rows[request_id].computed for request_id in output.num_scheduled_tokens}
        sampled: dict[str, list[int]] = {}
        for request_id in starts:
            self._read_states(request_id, read)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            sampled[request_id] = self._run(request_id, num_tokens, drafts, plans.get(request_id), written)
        for request_id, start in starts.items():
            self._read_kv(request_id, start)
        for page, reader in read.items():
            if not written.get(page, reader).startswith(reader):
                raise Fault(f"page {page}: {reader} reads the state that {written[page]} overwrites in this step")
        self.aliased_copies += len(touched & {p for plan in plans.values() for g in plan.block_ids.values() for p in g})
        for request_id, plan in plans.items():
            self.plans.append((request_id, plan))
        return Answer(output, sampled)

    def _admit(self, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            request = self.requests[new.req_id]
            seed = int.from_bytes(new.req_id.encode(), "little") % 1_000_003
            self.rows[new.req_id] = Row(
                [list(ids) for ids in new.block_ids], new.num_computed_tokens, seed, list(request.all_token_ids)
            )
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is not None:
                for table, ids in zip(self.rows[request_id].table, block_ids, strict=True):
                    table.extend(ids)
        if not self.checked:
            return
        for request_id in output.num_scheduled_tokens:
            for group, manager in enumerate(self.managers):
                blocks, table = manager.req_to_blocks[request_id], self.rows[request_id].table[group]
                if len(blocks) != len(table):
                    raise Fault(f"{request_id}, group {group}: worker has {len(table)} columns of {len(blocks)}")
                for column, (block, page) in enumerate(zip(blocks, table, strict=True)):
                    if not block.is_null and block.block_id != page:
                        raise Fault(f"{request_id}, group {group}, column {column}: worker {page}, {block.block_id}")

    def _copy(self, output: SchedulerOutput) -> set[int]:
        copies = output.kv_cache_block_copies or []
        targets = {copy.dst_block_id for copy in copies}
        if len(targets) != len(copies) or targets & {copy.src_block_id for copy in copies}:
            raise Fault(f"copies depend on each other's order: {copies}")
        for copy in copies:
            self.state[copy.dst_block_id] = self.state.get(copy.src_block_id, -1)
            self.kv[copy.dst_block_id] = dict(self.kv.get(copy.src_block_id, {}))
        return targets | {copy.src_block_id for copy in copies}

    def _is_prefill(self, request_id: str, row: Row) -> bool:
        request = self.requests[request_id]
        return row.computed < max(request.num_prompt_tokens, request.num_tokens - 1)

    def _read_states(self, request_id: str, read: dict[int, str]) -> None:
        """The states that prefills and first decodes start from hold the right label."""
        row, request = self.rows[request_id], self.requests[request_id]
        first_decode = row.computed == request.num_prompt_tokens and not row.ran_drafts
        if row.computed == 0 or not (first_decode or self._is_prefill(request_id, row)):
            return
        for group in self.mamba:
            page = row.table[group][(row.computed - 1) // self.managers[group].block_size]
            read[page] = f"{request_id}["
            if page == 0 or self.state.get(page) != row.label(row.computed):
                raise Fault(f"{request_id} starts at {row.computed} from page {page}, which holds another state")

    def _read_kv(self, request_id: str, start: int) -> None:
        """Attention sees the KV of all tokens before the query, also of this step: in a layer, KV comes first."""
        row = self.rows[request_id]
        for group in self.attention:
            size, table = self.managers[group].block_size, row.table[group]
            for position in range(start):
                if self.kv.get(table[position // size], {}).get(position % size) != row.label(position + 1):
                    raise Fault(
                        f"{request_id} attends to token {position} in page {table[position // size]}: not its KV"
                    )

    def _run(
        self, request_id: str, num_tokens: int, drafts: int, plan: PrefillPlan | None, written: dict[int, str]
    ) -> list[int]:
        row, request = self.rows[request_id], self.requests[request_id]
        start, prefill = row.computed, self._is_prefill(request_id, row)
        end = start + num_tokens
        own = f"{request_id}[{start},{end})"

        def write(page: int) -> None:
            if page == 0:
                raise Fault(f"{own} writes the null page")
            if written.setdefault(page, own) != own:
                raise Fault(f"page {page} is written by {written[page]} and {own} in one step")

        accepted = self.rng.randint(0, drafts)
        known = end - drafts + accepted
        for group in self.attention:
            size, table = self.managers[group].block_size, row.table[group]
            for position in range(start, end):
                page = table[position // size]
                write(page)
                self.kv.setdefault(page, {})[position % size] = row.label(position + 1) if position < known else -2
        for group in self.mamba:
            if prefill and not drafts:
                size, table = self.managers[group].block_size, row.table[group]
                write(table[(end - 1) // size])
                self.state[table[(end - 1) // size]] = row.label(end)
            else:
                self._decode(group, row, start, end, known, write)
        if plan is not None:
            self._export(own, row, plan, start, end, prefill, write)
        elif not self.plans_are_sent:
            self._export_stock(request_id, row, write)
        row.computed, row.ran_drafts = known, drafts > 0
        if prefill and end < request.num_tokens:
            return []
        row.label(known + 1)
        return row.tokens[end - drafts : known + 1]

    def _decode(self, group: int, row: Row, start: int, end: int, known: int, write: Callable[[int], None]) -> None:
        """Stock's worker keeps draft states behind the running one, and copies the state at a boundary back."""
        size, table = self.managers[group].block_size, row.table[group]
        column = (end - 1) // size
        for page in table[column : column + 1 + self.managers[group].num_speculative_blocks]:
            if page:
                write(page)
                self.state[page] = -2
        if known == end and end % size:
            self.state[table[column]] = row.label(end)
        for boundary in range(start // size * size + size, known + 1, size):
            self.state[table[boundary // size - 1]] = row.label(boundary)

    def _export(
        self, own: str, row: Row, plan: PrefillPlan, start: int, end: int, prefill: bool, write: Callable[[int], None]
    ) -> None:
        if (plan.start, plan.end) != (start, end) or not prefill:
            raise Fault(f"{own} has the plan of [{plan.start}, {plan.end})")
        if sorted(plan.block_ids) != self.mamba:
            raise Fault(f"{own}: pages for groups {sorted(plan.block_ids)}, Mamba groups are {self.mamba}")
        for group, pages in plan.block_ids.items():
            running = row.table[group][(end - 1) // self.managers[group].block_size]
            for position, page in zip(plan.positions, pages, strict=True):
                if page == running:
                    raise Fault(f"{own} exports to its running page {page}")
                write(page)
                self.state[page] = row.label(position)

    def _export_stock(self, request_id: str, row: Row, write: Callable[[int], None]) -> None:
        """What stock's worker derives by itself: one state, into a column of the block table."""
        for group in self.mamba:
            checkpoint = self.managers[group]._checkpoints.get(request_id)
            if checkpoint is not None:
                position, column = checkpoint
                write(row.table[group][column])
                self.state[row.table[group][column]] = row.label(position)

    # Checking.

    def _promises(self) -> None:
        """Learn what the hashes of all requests stand for."""
        pool = self.scheduler.kv_cache_manager.block_pool
        for request_id, request in self.requests.items():
            known = self._known_hashes.get(request_id, 0)
            for index in range(known, len(request.block_hashes)):
                promise = ((index + 1) * pool.hash_block_size, request_id)
                self.expected.setdefault(bytes(request.block_hashes[index]), promise)
            self._known_hashes[request_id] = len(request.block_hashes)

    def promised(self, block_hash: bytes) -> tuple[int, Row]:
        """Token count and tokens of a hash."""
        num_tokens, request_id = self.expected[block_hash]
        request = self.requests[request_id]
        row = self._reference.get(request_id)
        if row is None or len(row.tokens) < num_tokens:
            row = self._reference[request_id] = Row([], 0, 0, list(request.all_token_ids))
        return num_tokens, row

    def check_cache(self) -> None:
        """Every entry of the prefix cache leads to a page with what its hash promises."""
        self._promises()
        manager = self.scheduler.kv_cache_manager
        for key, block in list(entries(manager.block_pool)):
            group = get_group_id(key)
            num_tokens, row = self.promised(bytes(get_block_hash(key)))
            if group in self.mamba:
                if self.state.get(block.block_id) != row.label(num_tokens):
                    raise Fault(f"page {block.block_id} is cached as the state after {num_tokens} tokens; it is not")
            else:
                size = self.managers[group].block_size
                slots = self.kv.get(block.block_id, {})
                for position in range((num_tokens - 1) // size * size, num_tokens):
                    if slots.get(position % size) != row.label(position + 1):
                        raise Fault(f"page {block.block_id} is cached up to {num_tokens}; token {position} is wrong")

    def check_pool(self) -> None:
        """Reference counts, free lists, tiers and tables agree."""
        pool = self.scheduler.kv_cache_manager.block_pool
        owners = self._check_tables()
        if self.scheduler.deferred_frees:
            return
        for block in pool.blocks[1:]:
            if block.ref_cnt != owners.get(block.block_id, 0):
                raise Fault(
                    f"page {block.block_id}: {block.ref_cnt} references, {owners.get(block.block_id, 0)} owners"
                )
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        unused = {block.block_id for block in pool.blocks[1:] if not block.ref_cnt}
        if len(free) != pool.get_num_free_blocks() or set(free) != unused:
            raise Fault("the free list is not the set of pages without a reference")
        if isinstance(pool.free_block_queue, TieredFreeQueue):
            self._check_tiers(pool.free_block_queue, pool.blocks)

    def _check_tables(self) -> dict[int, int]:
        """No page is in two columns of a request or in two groups; pages with the number of their owners."""
        owners: dict[int, int] = {}
        for single in self.managers:
            for request_id, blocks in single.req_to_blocks.items():
                live = [block.block_id for block in blocks if not block.is_null]
                if len(set(live)) != len(live):
                    raise Fault(f"{request_id}: a page is in two columns: {live}")
                for page in live:
                    owners[page] = owners.get(page, 0) + 1
        groups: dict[int, int] = {}
        for group, single in enumerate(self.managers):
            for blocks in single.req_to_blocks.values():
                for block in blocks:
                    if not block.is_null and groups.setdefault(block.block_id, group) != group:
                        raise Fault(f"page {block.block_id} is in two KV cache groups")
        return owners

    def _check_tiers(self, queue: TieredFreeQueue, blocks: list[Any]) -> None:
        if queue._tier[0] != Tier.IN_USE:
            raise Fault("the null page is on a free list")
        for block in blocks[1:]:
            tier = queue._tier[block.block_id]
            if (tier == Tier.IN_USE) != (block.ref_cnt > 0):
                raise Fault(f"page {block.block_id} with {block.ref_cnt} references is on tier {tier}")
            if tier == Tier.EMPTY and block.block_hash is not None:
                raise Fault(f"page {block.block_id} holds an entry and is on the empty list")
            if tier == Tier.PROBATIONARY and block.block_id not in queue._probationary:
                raise Fault(f"page {block.block_id} is on the probationary list unmarked")
            if tier == Tier.PROTECTED and block.block_id in queue._probationary:
                raise Fault(f"page {block.block_id} is on the protected list and marked probationary")
        for tier in (Tier.EMPTY, Tier.PROBATIONARY, Tier.PROTECTED):
            listed = [block.block_id for block in queue._lists[tier].get_all_free_blocks()]
            if len(listed) != queue._lists[tier].num_free_blocks or any(queue._tier[b] != tier for b in listed):
                raise Fault(f"list {tier.name} and its count or its marks differ")

    def check_all_returned(self) -> None:
        """No request is left and every page is free."""
        pool = self.scheduler.kv_cache_manager.block_pool
        assert not self.scheduler.requests
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert all(block.ref_cnt == 0 for block in pool.blocks[1:])
        assert not any(single.req_to_blocks for single in self.managers)


def entries(pool: Any) -> Iterator[tuple[Any, Any]]:
    """All (key, block) pairs of a prefix cache."""
    for key, blocks in pool.cached_block_hash_to_block._cache.items():
        for block in blocks.values() if isinstance(blocks, dict) else (blocks,):
            yield key, block


def retained(engine: Engine, request: Request) -> list[int]:
    """Token counts of `request`'s prefix whose state is cached in every Mamba group."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    groups = [m.kv_cache_group_id for m in managers if isinstance(m, MambaManager)]
    return [
        (index + 1) * pool.hash_block_size
        for index, block_hash in enumerate(request.block_hashes)
        if pool.get_cached_block(block_hash, groups)
    ]


class Tools:
    """The helpers of this file, for tests cannot import it."""

    ShadowWorker = ShadowWorker
    Fault = Fault
    entries = staticmethod(entries)
    retained = staticmethod(retained)


@pytest.fixture(scope="session")
def states() -> Tools:
    """Helpers that look into pages and entries."""
    return Tools()
