# SPDX-License-Identifier: Apache-2.0
"""A worker made of labels.

It executes scheduler outputs like a GPU worker would, but a block holds labels instead of numbers. After every step
each entry of the prefix cache must lead to a block with exactly the labels its hash promises.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.invariants.access import StepAccess, check_copies
from tests.invariants.pool import check_pool
from tests.v1.core.labels import Answer, Fault, Row
from tests.v1.core.shadow_memory import ShadowMemory
from vllm.v1.core.prefill_plan import PrefillPlan
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm_kda_prefill.planning import Engine


class ShadowWorker(ShadowMemory):
    """Executes steps in order, as a GPU stream does, and checks what they read, write and publish."""

    def __init__(self, engine: Engine, seed: int = 0, checked: bool = True) -> None:
        super().__init__(engine, seed, checked)
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
            check_pool(self.scheduler)
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
            check_pool(self.scheduler)
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
        access = StepAccess()
        starts = {request_id: self.rows[request_id].computed for request_id in output.num_scheduled_tokens}
        sampled: dict[str, list[int]] = {}
        for request_id in starts:
            self._read_states(request_id, access)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            sampled[request_id] = self._run(request_id, num_tokens, drafts, plans.get(request_id), access)
        for request_id, start in starts.items():
            self._read_kv(request_id, start)
        access.check()
        self.aliased_copies += len(
            touched & {b for plan in plans.values() for ids in plan.block_ids.values() for b in ids}
        )
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
                for column, (block, block_id) in enumerate(zip(blocks, table, strict=True)):
                    if not block.is_null and block.block_id != block_id:
                        raise Fault(
                            f"{request_id}, group {group}, column {column}: worker {block_id}, {block.block_id}"
                        )

    def _copy(self, output: SchedulerOutput) -> set[int]:
        copies = output.kv_cache_block_copies or []
        touched = check_copies(copies)
        for copy in copies:
            self.state[copy.dst_block_id] = self.state.get(copy.src_block_id, -1)
            self.kv[copy.dst_block_id] = dict(self.kv.get(copy.src_block_id, {}))
        return touched

    def _is_prefill(self, request_id: str, row: Row) -> bool:
        request = self.requests[request_id]
        return row.computed < max(request.num_prompt_tokens, request.num_tokens - 1)

    def _read_states(self, request_id: str, access: StepAccess) -> None:
        """The states that prefills and first decodes start from hold the right label."""
        row, request = self.rows[request_id], self.requests[request_id]
        first_decode = row.computed == request.num_prompt_tokens and not row.ran_drafts
        if row.computed == 0 or not (first_decode or self._is_prefill(request_id, row)):
            return
        for group in self.mamba:
            block_id = row.table[group][(row.computed - 1) // self.managers[group].block_size]
            access.read(block_id, request_id)
            if block_id == 0 or self.state.get(block_id) != row.label(row.computed):
                raise Fault(f"{request_id} starts at {row.computed} from block {block_id}, which holds another state")

    def _read_kv(self, request_id: str, start: int) -> None:
        """Attention sees the KV of all tokens before the query, also of this step: in a layer, KV comes first."""
        row = self.rows[request_id]
        for group in self.attention:
            size, table = self.managers[group].block_size, row.table[group]
            for position in range(start):
                if self.kv.get(table[position // size], {}).get(position % size) != row.label(position + 1):
                    raise Fault(
                        f"{request_id} attends to token {position} in block {table[position // size]}: not its KV"
                    )

    def _run(
        self, request_id: str, num_tokens: int, drafts: int, plan: PrefillPlan | None, access: StepAccess
    ) -> list[int]:
        row, request = self.rows[request_id], self.requests[request_id]
        start, prefill = row.computed, self._is_prefill(request_id, row)
        end = start + num_tokens
        own = f"{request_id}[{start},{end})"

        def write(block_id: int) -> None:
            access.write(block_id, request_id)

        accepted = self.rng.randint(0, drafts)
        known = end - drafts + accepted
        for group in self.attention:
            size, table = self.managers[group].block_size, row.table[group]
            for position in range(start, end):
                block_id = table[position // size]
                write(block_id)
                self.kv.setdefault(block_id, {})[position % size] = row.label(position + 1) if position < known else -2
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
        for block_id in table[column : column + 1 + self.managers[group].num_speculative_blocks]:
            if block_id:
                write(block_id)
                self.state[block_id] = -2
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
            raise Fault(f"{own}: blocks for groups {sorted(plan.block_ids)}, Mamba groups are {self.mamba}")
        for group, block_ids in plan.block_ids.items():
            running = row.table[group][(end - 1) // self.managers[group].block_size]
            for position, block_id in zip(plan.positions, block_ids, strict=True):
                if block_id == running:
                    raise Fault(f"{own} exports to its running block {block_id}")
                write(block_id)
                self.state[block_id] = row.label(position)

    def _export_stock(self, request_id: str, row: Row, write: Callable[[int], None]) -> None:
        """What stock's worker derives by itself: one state, into a column of the block table."""
        for group in self.mamba:
            checkpoint = self.managers[group]._checkpoints.get(request_id)
            if checkpoint is not None:
                position, column = checkpoint
                write(row.table[group][column])
                self.state[row.table[group][column]] = row.label(position)
