# SPDX-License-Identifier: Apache-2.0
"""An engine, the toy model, and everything known about the texts that go through them."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass

import numpy as np
import torch

from tests.invariants.checked_worker import CheckedWorker
from tests.invariants.contents import Entry, NamedPrefix, cache_entries, check_contents, check_tables
from tests.invariants.fingerprints import EMPTY, Fingerprints, extend
from tests.invariants.pool import check_nothing_leaked, check_pool
from tests.traffic.scripted import Scripted
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.prefill_plan import PLANS_ATTRIBUTE
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.state_retention import Policy
from vllm.v1.request import Request, RequestStatus
from vllm_kda_prefill.demo.conversation import TOLERANCE, relative_difference
from vllm_kda_prefill.planning import Arm, Engine, Layout
from vllm_kda_prefill.toymodel.model import ModelSizes, ToyModel
from vllm_kda_prefill.toymodel.server import Server

MODELS = {groups: ToyModel(ModelSizes(kda_layers=groups)) for groups in (1, 2)}
MAX_IN_FLIGHT = 3
"""Steps scheduled before the first of them is run: the worker is up to two steps late."""

STALLED = 40
"""Steps that schedule nothing while requests are left: more than any wait of the scheduler's takes."""

ENDLESS = 1000
"""Steps without a sampled token while requests are left: a few of the longest prefills, one after the other."""


@dataclass(frozen=True)
class Setting:
    """One engine: its layout, its arm and how it is driven."""

    layout: Layout
    arm: Arm = "coalesced"
    policy: Policy = "ladder"
    asynchronous: bool = False
    seed: int = 0


class World:
    """Drives one engine and checks it after every step.

    Attributes:
        texts: Request id -> prompt and all outputs it will be given.
        counts: What has happened so far, for the soak's report.
        broken: Whether a check has failed, after which nothing more can be learnt.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.layout = setting.layout
        self.texts: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.counts: Counter[str] = Counter()
        self._prefixes: dict[str, Fingerprints] = {}
        self._names: dict[bytes, NamedPrefix] = {}
        self._named: Counter[str] = Counter()
        self._snapshots: deque[list[Entry]] = deque()
        self._growing: set[str] = set()
        self._idle_steps = 0
        self._tokenless_steps = 0
        self.broken = False
        self._random = random.Random(setting.seed)
        self.model = MODELS[self.layout.mamba_groups]
        engine = Engine.build(self.layout, setting.arm, setting.policy, setting.asynchronous)
        self.scheduler = engine.scheduler
        self._count_evictions()
        sampler = Scripted(self.texts, self._accepted)
        self.server = Server(engine, self.layout, self.model, sampler, CheckedWorker)

    def _accepted(self, request_id: str, position: int) -> int:
        """0 to 3 drafts, the same whenever it is asked."""
        return (position * 2654435761 + self.setting.seed * 40503 + len(request_id)) % 2**32 >> 13 & 3

    # What traffic does.

    @property
    def capacity(self) -> int:
        """Tokens of a request that fits the pool next to its states: running, source, copy and checkpoint, and the
        sources of the steps that are late. Two requests without room for the last preempt each other for ever, on
        stock's scheduler as on this fork's: a state is freed when its step comes back, and nobody waits for that."""
        late = MAX_IN_FLIGHT - 1 if self.setting.asynchronous else 0
        late *= 2 if self.layout.mtp else 1
        states = self.layout.mamba_groups * (4 + self.layout.mtp + late)
        return (self.layout.num_blocks - 1 - states) * self.layout.attention_block * self.layout.dcp

    def words(self, count: int) -> list[int]:
        return [self._random.randrange(self.model.sizes.vocabulary) for _ in range(count)]

    def arrive(self, prompt: list[int], outputs: int = 1, priority: int = 0) -> str:
        """Queue a request whose outputs are random words; its prompt is cut to what the pool can hold."""
        prompt = prompt[: self.capacity - outputs - self.layout.mtp - 1]
        request_id = f"r{len(self.texts)}"
        self.texts[request_id] = prompt + self.words(outputs)
        self._prefixes[request_id] = extend_all(self.texts[request_id])
        self.requests[request_id] = self.server.engine.add(request_id, prompt, outputs, priority)
        self._growing.add(request_id)
        self.counts["requests"] += 1
        return request_id

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.counts["aborts"] += 1

    def reset_prefix_cache(self, preempt: bool) -> None:
        self.scheduler.reset_prefix_cache(reset_running_requests=preempt)
        self.counts["resets"] += 1

    def evict(self, attention: bool) -> None:
        """Evict all that attention, or all that the recurrent groups, have in the cache and nobody uses."""
        self._learn_names()
        pool = self.scheduler.kv_cache_manager.block_pool
        lost = {
            block_id
            for group, block_id, _ in cache_entries(self.scheduler, self._names)
            if (group == self.server.worker.attention_group) == attention and pool.blocks[block_id].ref_cnt == 0
        }
        pool.evict_blocks(lost)
        self.counts["evictions forced"] += len(lost)

    def check_cache(self) -> None:
        """Whatever the prefix cache would serve now is what its name says; call it with no step in flight."""
        assert not self.server.in_flight
        self._learn_names()
        check_contents(self.server.worker, cache_entries(self.scheduler, self._names))

    @property
    def live(self) -> list[str]:
        return [request_id for request_id, request in self.requests.items() if not request.is_finished()]

    def schedule(self) -> None:
        """Schedule a step; the worker runs it later, the oldest first."""
        if len(self.server.in_flight) == MAX_IN_FLIGHT or not self.setting.asynchronous:
            self.run_all()
        self.broken = True
        output = self.server.schedule()
        self._learn_names()
        self._snapshots.append(cache_entries(self.scheduler, self._names))
        check_pool(self.scheduler)
        self._count(output)
        self.broken = False

    def run_oldest(self) -> None:
        """Let the worker run the oldest scheduled step, and check everything it wrote."""
        if not self.server.in_flight:
            return
        self.broken = True
        in_order = len(self.server.in_flight) == 1
        output = self.server.in_flight[0]
        worker = self.server.worker
        result = worker.execute(output)
        check_contents(worker, self._snapshots.popleft())
        if in_order:
            check_tables(self.scheduler, worker)
        self.server.in_flight.popleft()
        if result.logits:
            self._tokenless_steps = 0
        self.server.logits |= result.logits
        self.server.report(output, result)
        check_pool(self.scheduler)
        self._check_finished()
        self.broken = False

    def run_all(self) -> None:
        while self.server.in_flight:
            self.run_oldest()

    def step(self) -> None:
        self.schedule()
        if not self.setting.asynchronous:
            self.run_all()

    def drain(self) -> None:
        """Serve what is left; then nothing may be leaked."""
        while self.live:
            self.step()
        self.run_all()
        # The worker learns of finished requests with the next step.
        self.step()
        self.run_all()
        check_nothing_leaked(self.scheduler)
        assert not self.server.worker.requests

    # Bookkeeping and checks.

    def _count_evictions(self) -> None:
        """Count the blocks that are taken from the free list while they hold a cached entry."""
        queue = self.scheduler.kv_cache_manager.block_pool.free_block_queue
        take = queue.popleft_n

        def taken(count: int) -> list[KVCacheBlock]:
            blocks = take(count)
            self.counts["evictions"] += sum(block.block_hash is not None for block in blocks)
            return blocks

        queue.popleft_n = taken

    def _count(self, output: SchedulerOutput) -> None:
        self.counts["steps"] += 1
        self.counts["tokens"] += output.total_num_scheduled_tokens
        plans = getattr(output, PLANS_ATTRIBUTE, {})
        self.counts["exports"] += sum(len(plan.positions) for plan in plans.values())
        self.counts["preemptions"] += len(output.preempted_req_ids or ())
        self.counts["copies"] += len(output.kv_cache_block_copies or ())
        for new in output.scheduled_new_reqs:
            self.counts["hits"] += new.num_computed_tokens > 0
            self.counts["hit tokens"] += new.num_computed_tokens
        working = output.total_num_scheduled_tokens > 0 or not self.live
        self._idle_steps = 0 if working else self._idle_steps + 1
        assert self._idle_steps < STALLED, f"requests {self.live} wait for ever"
        self._tokenless_steps += 1
        assert self._tokenless_steps < ENDLESS or not self.live, f"requests {self.live} compute for ever"

    def _learn_names(self) -> None:
        """Remember which tokens each block hash names."""
        unit = self.scheduler.hash_block_size
        for request_id in list(self._growing):
            hashes = self.requests[request_id].block_hashes
            for index in range(self._named[request_id], len(hashes)):
                named = NamedPrefix((index + 1) * unit, self._prefixes[request_id])
                self._names.setdefault(hashes[index], named)
            self._named[request_id] = len(hashes)
            if self.requests[request_id].is_finished():
                self._growing.remove(request_id)

    def _check_finished(self) -> None:
        """Compare what finished requests sampled with uncached runs, and forget it."""
        sampled: dict[str, list[int]] = {}
        for request_id, position in self.server.logits:
            if self.requests[request_id].is_finished():
                sampled.setdefault(request_id, []).append(position)
        for request_id, positions in sampled.items():
            text = self.texts[request_id]
            known = [position for position in positions if position < len(text)]
            served = [self.server.logits.pop((request_id, position)) for position in positions]
            if not known:
                continue
            logits = torch.stack([x for x, p in zip(served, positions, strict=True) if p < len(text)])
            expected = self.model.uncached(text, [position - 1 for position in known])
            difference = relative_difference(logits, expected)
            assert difference < TOLERANCE, f"request {request_id} differs from its uncached run by {difference:.1e}"
            self.counts["outputs"] += len(known)
        finished = {i for i, r in self.requests.items() if r.is_finished()}
        for request_id in finished & set(sampled):
            request = self.requests[request_id]
            if request.status == RequestStatus.FINISHED_LENGTH_CAPPED:
                assert list(request.all_token_ids) == self.texts[request_id]


def extend_all(text: list[int]) -> Fingerprints:
    """Fingerprints of every prefix of a text, the empty one first."""
    return np.concatenate([[EMPTY], extend(EMPTY, text)]).astype(np.int64)
