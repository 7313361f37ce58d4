# SPDX-License-Identifier: Apache-2.0
"""What the worker remembers of a request between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.core.sched.output import SchedulerOutput


@dataclass
class WorkerRequest:
    """One request's tokens, blocks and recurrent position.

    Attributes:
        request_id: vLLM's id.
        tokens: Known tokens, prompt and outputs.
        prefill_len: Tokens known when the request was (re)scheduled; below it a step samples nothing.
        computed: Tokens computed, rejected drafts taken back.
        announced: The scheduler's own count, which runs ahead under asynchronous scheduling.
        tables: Block ids of each KV cache group. They only ever grow.
        state_column: Column of the Mamba tables with the running state; -1 before the first token.
        accepted: Which of the columns from there on holds the true state, counted from 1: the one after
            `accepted` tokens of the last query.
        drafts: Guesses at the tokens after the known ones.
    """

    request_id: str
    tokens: list[int]
    computed: int
    announced: int
    tables: list[list[int]]
    state_column: int
    prefill_len: int = 0
    accepted: int = 1
    drafts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prefill_len = len(self.tokens)

    def append_tokens(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens

    def append_blocks(self, block_ids: Sequence[Sequence[int]]) -> None:
        for table, new in zip(self.tables, block_ids, strict=True):
            table.extend(new)

    def inputs(self, count: int) -> list[int]:
        """The next `count` tokens to compute: known ones, then drafts (token 0 where there is none yet)."""
        ahead = self.tokens[self.computed :] + self.drafts
        return (ahead + [0] * count)[:count]


def update_requests(known: dict[str, WorkerRequest], output: SchedulerOutput, block_tokens: int) -> None:
    """Follow a scheduler output, from which alone a worker learns of requests.

    Args:
        known: Requests with blocks, by id; changed in place.
        output: The step.
        block_tokens: Tokens of a Mamba block.
    """
    for request_id in output.finished_req_ids | (output.preempted_req_ids or set()):
        known.pop(request_id, None)
    for new in output.scheduled_new_reqs:
        assert new.prefill_token_ids is not None
        known[new.req_id] = WorkerRequest(
            request_id=new.req_id,
            tokens=list(new.prefill_token_ids),
            computed=new.num_computed_tokens,
            announced=new.num_computed_tokens,
            tables=[list(block_ids) for block_ids in new.block_ids],
            state_column=(new.num_computed_tokens - 1) // block_tokens,
        )
    cached = output.scheduled_cached_reqs
    rows = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
    for request_id, announced, block_ids in rows:
        known[request_id].announced = announced
        if block_ids is not None:
            known[request_id].append_blocks(block_ids)
