# SPDX-License-Identifier: Apache-2.0
"""The toy model's worker, whose every read and write is checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.invariants.access import StepAccess, check_copies
from tests.invariants.fingerprints import EMPTY, Fingerprints, extend, spoiled
from tests.invariants.prefixes import Prefixes
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.core.prefill_plan import PrefillPlan
from vllm.v1.core.sched.output import SchedulerOutput
from vllm_kda_prefill.toymodel.batch import Batch
from vllm_kda_prefill.toymodel.kda_rows import kda_rows
from vllm_kda_prefill.toymodel.requests import WorkerRequest
from vllm_kda_prefill.toymodel.worker import StepResult, ToyWorker


class WrongContentError(AssertionError):
    """A request is about to compute from a block that holds something else than its own prefix."""


class CheckedWorker(ToyWorker):
    """Raises as soon as a request reads another prefix than its own, or rows of a step are in each other's way.

    Attributes:
        prefixes: Which prefix each block holds.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.prefixes = Prefixes(len(self.blocks), self.blocks.attention_block, self.num_spec)
        self.memories.append(self.prefixes)
        self._known: dict[str, tuple[WorkerRequest, Fingerprints]] = {}
        self._copied: set[int] = set()
        self._is_planned = False

    def execute(self, output: SchedulerOutput) -> StepResult:
        self._known = {request_id: known for request_id, known in self._known.items() if request_id in self.requests}
        return super().execute(output)

    def _copy_blocks(self, output: SchedulerOutput) -> None:
        self._copied = check_copies(output.kv_cache_block_copies or [])
        super()._copy_blocks(output)

    def _bind(self, plans: Mapping[str, PrefillPlan] | None, batch: Batch) -> None:
        self._is_planned = plans is not None
        super()._bind(plans, batch)

    def _forward(self, batch: Batch, metadata: dict[int, GDNAttentionMetadata]) -> list[Tensor]:
        self._check_access(batch, metadata)
        tokens = [r.inputs(count) for r, count in zip(batch.requests, batch.scheduled.tolist(), strict=True)]
        self._follow(batch, metadata, tokens)
        hidden = super()._forward(batch, metadata)
        for request, own in zip(batch.requests, tokens, strict=True):
            self._check_context(request, own)
        return hidden

    def _check_access(self, batch: Batch, metadata: dict[int, GDNAttentionMetadata]) -> None:
        """Kernels read and write in any order: no block has two writers, and no planned export hits a block that the
        step uses otherwise."""
        access, exported = StepAccess(), set()
        used = self._copied | {block_id for r in batch.requests for block_id in r.tables[self.attention_group]}
        for m in metadata.values():
            for row in kda_rows(len(batch.requests), m):
                request_id, count = batch.requests[row.row].request_id, int(batch.scheduled[row.row])
                if row.resumes:
                    access.read(row.source, request_id)
                for block_id in (*row.block_ids[: count if row.accepted else 1], *row.exports.values()):
                    access.write(block_id, request_id)
                used |= set(row.block_ids)
                exported |= set(row.exports.values())
        clash = used & exported if self._is_planned else set()
        assert not clash, f"exports go to blocks {sorted(clash)}, which the same step reads or writes"
        for request, count in zip(batch.requests, batch.scheduled.tolist(), strict=True):
            block_ids, _ = self._places(request, request.computed, request.computed + count)
            for block_id in np.unique(block_ids).tolist():
                access.write(block_id, request.request_id)
        access.check()

    def _follow(self, batch: Batch, metadata: dict[int, GDNAttentionMetadata], tokens: list[list[int]]) -> None:
        """Follow which prefix each row reads and writes; states that a query starts from are the request's own."""
        chains: dict[int, Fingerprints] = {}
        for group in self.mamba_groups:
            for row in kda_rows(len(batch.requests), metadata[group]):
                request = batch.requests[row.row]
                chain = self.prefixes.run(group, row, tokens[row.row])
                if not np.array_equal(chain, self._own(request, tokens[row.row])):
                    raise WrongContentError(
                        f"request {request.request_id} resumes at {request.computed} in KV cache group {group} "
                        "from a block that holds another state"
                    )
                known = chains.setdefault(row.row, chain)
                if not np.array_equal(known, chain):
                    chains[row.row] = np.array([spoiled(*pair) for pair in zip(known, chain, strict=True)])
        for index, request in enumerate(batch.requests):
            places = self._places(request, request.computed, request.computed + len(tokens[index]))
            self.prefixes.write_rows(self.attention_group, *places, chains[index])

    def _check_context(self, request: WorkerRequest, tokens: list[int]) -> None:
        """The attention rows of a query's whole context are the request's own."""
        known = self._prefixes_of(request)[1 : request.computed + 1]
        expected = np.concatenate([known, self._own(request, tokens)])
        held = self.prefixes.rows[self._places(request, 0, request.computed + len(tokens))]
        wrong = np.flatnonzero(held != expected)
        if len(wrong):
            raise WrongContentError(
                f"request {request.request_id} attends to {len(wrong)} wrong rows, the first for token {wrong[0]}"
            )

    def _own(self, request: WorkerRequest, tokens: list[int]) -> Fingerprints:
        """The request's own prefixes after each of its query's tokens."""
        return extend(int(self._prefixes_of(request)[request.computed]), tokens)

    def _prefixes_of(self, request: WorkerRequest) -> Fingerprints:
        """Fingerprints of a request's known prefixes, the empty one first."""
        owner, known = self._known.get(request.request_id, (None, np.array([EMPTY], np.int64)))
        if owner is not request:
            known = np.array([EMPTY], np.int64)
        if len(known) <= len(request.tokens):
            known = np.concatenate([known, extend(int(known[-1]), request.tokens[len(known) - 1 :])])
        self._known[request.request_id] = (request, known)
        return known

    def _places(self, request: WorkerRequest, start: int, end: int) -> tuple[Fingerprints, Fingerprints]:
        """Blocks and offsets of tokens [start, end) in the attention cache."""
        block_ids, offsets = self._attention_places(request, torch.arange(start, end))
        return block_ids.numpy(), offsets.numpy()
