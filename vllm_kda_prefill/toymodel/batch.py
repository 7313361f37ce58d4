# SPDX-License-Identifier: Apache-2.0
"""One step's packed batch, and the attention metadata that vLLM's builders read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm_kda_prefill.toymodel.requests import WorkerRequest

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Batch:
    """Requests of a step in packed order; every array has one entry a row.

    Attributes:
        requests: The rows.
        scheduled: Tokens of the step, drafts included.
        drafts: Draft tokens among them.
        announced: The scheduler's count of tokens computed before.
        starts: Tokens truly computed before.
        query_start_loc: First token of each row in the packed batch, and the total: `rows + 1` entries.
        num_spec: Draft tokens of the engine.
    """

    requests: tuple[WorkerRequest, ...]
    scheduled: Int32
    drafts: Int32
    announced: Int32
    starts: Int32
    query_start_loc: Int32
    num_spec: int

    @classmethod
    def of(cls, output: SchedulerOutput, known: Mapping[str, WorkerRequest], num_spec: int) -> Batch:
        """The batch of a scheduler output: verifying rows first, then short ones, then long ones."""
        drafts = {i: len(output.scheduled_spec_decode_tokens.get(i, ())) for i in output.num_scheduled_tokens}
        tokens = output.num_scheduled_tokens
        order = sorted(tokens, key=lambda i: (not drafts[i], tokens[i] != num_spec + 1, tokens[i]))
        requests = tuple(known[i] for i in order)
        scheduled = np.array([tokens[i] for i in order], np.int32)
        return cls(
            requests=requests,
            scheduled=scheduled,
            drafts=np.array([drafts[i] for i in order], np.int32),
            announced=np.array([r.announced for r in requests], np.int32),
            starts=np.array([r.computed for r in requests], np.int32),
            query_start_loc=np.concatenate([[0], scheduled.cumsum()]).astype(np.int32),
            num_spec=num_spec,
        )

    @property
    def request_ids(self) -> list[str]:
        return [request.request_id for request in self.requests]

    @property
    def is_prefilling(self) -> npt.NDArray[np.bool_]:
        """Rows with known tokens left to compute, except where that is one token after a computed prefix: it
        may carry placeholder drafts, and only the verifying kernels can take those back."""
        prefill_len = np.array([r.prefill_len for r in self.requests])
        before = np.minimum(self.announced, prefill_len)
        one_more = (self.scheduled - self.drafts == 1) & (before > 0)
        return (before < prefill_len) & ~one_more

    def draft_counts(self) -> torch.Tensor | None:
        """int32 `[rows]` for the builder: drafts of verifying and decoding rows, -1 elsewhere."""
        if not self.num_spec:
            return None
        verifies = ~self.is_prefilling & (self.scheduled <= self.num_spec + 1)
        return torch.from_numpy(np.where(verifies, self.drafts, -1).astype(np.int32))

    def accepted(self) -> torch.Tensor | None:
        """int32 `[rows]`: which state column each row continues from, counted from 1."""
        if not self.num_spec:
            return None
        return torch.tensor([r.accepted for r in self.requests], dtype=torch.int32)

    def metadata(self, group: int) -> CommonAttentionMetadata:
        """Metadata of the batch with one KV cache group's block table."""
        tables = [r.tables[group] for r in self.requests]
        table = torch.zeros(len(tables), max(map(len, tables)) + self.num_spec + 1, dtype=torch.int32)
        for row, block_ids in enumerate(tables):
            table[row, : len(block_ids)] = torch.tensor(block_ids, dtype=torch.int32)
        bounds = torch.from_numpy(self.query_start_loc)
        upper = torch.from_numpy(self.announced + self.scheduled)
        return CommonAttentionMetadata(
            query_start_loc=bounds,
            query_start_loc_cpu=bounds,
            seq_lens=torch.from_numpy(self.starts + self.scheduled),
            num_reqs=len(tables),
            num_actual_tokens=int(bounds[-1]),
            max_query_len=int(self.scheduled.max()),
            max_seq_len=int(upper.max()),
            block_table_tensor=table,
            slot_mapping=torch.zeros(int(bounds[-1]), dtype=torch.int64),
            is_prefilling=torch.from_numpy(self.is_prefilling),
            seq_lens_cpu_upper_bound=upper,
        )
