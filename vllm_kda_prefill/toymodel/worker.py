# SPDX-License-Identifier: Apache-2.0
"""A CPU worker that serves the toy model from scheduler outputs alone, as vLLM's runner does on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.v1.attention.backends.checkpoint_rows import bind_rows
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.gdn_checkpoint import CheckpointedGDNMetadataBuilder
from vllm.v1.core.prefill_plan import CHECKPOINT_ALIGNMENT, PLANS_ATTRIBUTE, PrefillPlan, plans_of
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm_kda_prefill.toymodel.batch import Batch
from vllm_kda_prefill.toymodel.blocks import Blocks, Memory
from vllm_kda_prefill.toymodel.kda import WINDOW, KDAInputs, KDALayer
from vllm_kda_prefill.toymodel.kda_rows import KDARow, kda_rows
from vllm_kda_prefill.toymodel.migration import Migration
from vllm_kda_prefill.toymodel.model import ToyModel
from vllm_kda_prefill.toymodel.requests import WorkerRequest, update_requests
from vllm_kda_prefill.toymodel.sampler import Sampler


@dataclass(frozen=True)
class StepResult:
    """What a step returns to the engine.

    Attributes:
        sampled: Request id -> sampled tokens, none for a prompt that is not finished; in packed order.
        drafts: Request id -> guesses for the next step, sampling requests only.
        logits: `(request id, position)` -> logits `[vocabulary]` of the token sampled for that position.
    """

    sampled: dict[str, list[int]]
    drafts: dict[str, list[int]]
    logits: dict[tuple[str, int], Tensor]


class ToyWorker:
    """Executes scheduler outputs in order.

    Attributes:
        blocks: The KV cache.
        memories: The KV cache, and whatever else follows what happens to its blocks.
        requests: Requests with blocks, by id.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        attention_block: int,
        model: ToyModel,
        sampler: Sampler,
    ) -> None:
        """Build metadata builders and an empty KV cache.

        Args:
            vllm_config: As the scheduler's, its hash block size and hit alignment resolved.
            kv_cache_config: One attention group, and a Mamba group for each KDA layer of the model.
            attention_block: Tokens of an attention block over all context-parallel ranks.
            model: The model.
            sampler: Where output and draft tokens come from.
        """
        specs = dict(enumerate(group.kv_cache_spec for group in kv_cache_config.kv_cache_groups))
        mamba = {group: spec for group, spec in specs.items() if isinstance(spec, MambaSpec)}
        (self.attention_group,) = specs.keys() - mamba.keys()
        self.mamba_groups = dict(zip(mamba, model.kda, strict=True))
        self.builders = {
            group: CheckpointedGDNMetadataBuilder(
                spec, kv_cache_config.kv_cache_groups[group].layer_names, vllm_config, torch.device("cpu")
            )
            for group, spec in mamba.items()
        }
        self.num_spec = vllm_config.num_speculative_tokens
        self.blocks = Blocks(kv_cache_config.num_blocks, attention_block, self.num_spec, model.sizes)
        self.memories: list[Memory] = [self.blocks]
        self.migration = Migration(self.memories, mamba, next(iter(mamba.values())).block_size)
        self.model = model
        self.sampler = sampler
        self.requests: dict[str, WorkerRequest] = {}

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Run one step.

        Raises:
            PlanMismatchError: A plan does not fit the batch.
        """
        # Before anything else, as this fork's worker does. Stock's scheduler has no plans, and stock's rule applies.
        plans = plans_of(output) if hasattr(output, PLANS_ATTRIBUTE) else None
        update_requests(self.requests, output, self.migration.block_tokens)
        # The order of vLLM's runner: recycled blocks are zeroed, then copies made, then the forward pass runs.
        for memory in self.memories:
            memory.clear(output.new_block_ids_to_zero or [])
        self._copy_blocks(output)
        if not output.num_scheduled_tokens:
            return StepResult({}, {}, {})
        batch = Batch.of(output, self.requests, self.num_spec)
        self._bind(plans, batch)
        for request, count in zip(batch.requests, batch.scheduled.tolist(), strict=True):
            self.migration.before(request, count)
        metadata = {group: self._metadata(batch, group) for group in self.builders}
        return self._sample(batch, self._forward(batch, metadata))

    def _copy_blocks(self, output: SchedulerOutput) -> None:
        for copy in output.kv_cache_block_copies or []:
            for memory in self.memories:
                memory.copy(copy.src_block_id, copy.dst_block_id)

    # Metadata.

    def _bind(self, plans: Mapping[str, PrefillPlan] | None, batch: Batch) -> None:
        """Bind the step's plans to the builders, or stock's rule for None."""
        if plans is None:
            for group, builder in self.builders.items():
                builder.bind(None, group)
            return
        rows = bind_rows(
            plans,
            request_ids=batch.request_ids,
            num_computed_tokens=batch.announced,
            num_scheduled_tokens=batch.scheduled,
            query_start_loc=batch.query_start_loc,
            group_ids=self.builders.keys(),
            num_blocks=len(self.blocks),
        )
        for group, builder in self.builders.items():
            builder.bind(rows, group)

    def _metadata(self, batch: Batch, group: int) -> GDNAttentionMetadata:
        return self.builders[group].build(
            0,
            batch.metadata(group),
            num_accepted_tokens=batch.accepted(),
            num_decode_draft_tokens_cpu=batch.draft_counts(),
        )

    # The forward pass.

    def _forward(self, batch: Batch, metadata: dict[int, GDNAttentionMetadata]) -> list[Tensor]:
        """Hidden rows `[tokens, width]` of each row after the KDA layers, which attention has cached."""
        tokens = [r.inputs(count) for r, count in zip(batch.requests, batch.scheduled.tolist(), strict=True)]
        hidden = [self.model.embedding[torch.tensor(row)] for row in tokens]
        for group, layer in self.mamba_groups.items():
            for row in kda_rows(len(batch.requests), metadata[group]):
                x = self.model.norm(hidden[row.row])
                hidden[row.row] = hidden[row.row] + self._run_kda(layer, row, x)
        for request, x in zip(batch.requests, hidden, strict=True):
            self._write_attention(request, x)
        return hidden

    def _run_kda(self, layer: KDALayer, row: KDARow, x: Tensor) -> Tensor:
        """One row of one layer: its output `[T, width]`."""
        blocks, first = self.blocks, row.block_ids[0]
        if row.resumes:
            state = blocks.states[row.source].clone()
            window = blocks.windows[first, row.offset : row.offset + WINDOW].clone()
        else:
            state = layer.initial_state()
            window = torch.zeros(WINDOW, layer.sizes.channels, dtype=torch.float64)
        raw = layer.raw(x)
        inputs = layer.inputs(x, raw, window)
        history = torch.cat([window, raw])
        if row.accepted is not None:
            out = self._verify(layer, row, inputs, state)
            # The window keeps every draft's row: the next query starts after as many as are accepted.
            blocks.write_window(first, history[1:])
            return layer.project(out)
        out, states = layer.chunked(inputs, state)
        for after, block_id in row.exports.items():
            self._export(block_id, after, states[after // CHECKPOINT_ALIGNMENT], history)
        self._export(first, len(x), states[-1], history)
        return layer.project(out)

    def _verify(self, layer: KDALayer, row: KDARow, inputs: KDAInputs, state: Tensor) -> Tensor:
        """Token by token, each token's state to its own block."""
        outputs = []
        for token in range(inputs.q.shape[1]):
            out, state = layer.step(inputs, token, state)
            self.blocks.write_state(row.block_ids[token], state)
            outputs.append(out)
        return torch.stack(outputs, 1)

    def _export(self, block_id: int, after: int, state: Tensor, history: Tensor) -> None:
        """Write the state after `after` tokens of a row, and the three raw rows before that point."""
        self.blocks.write_state(block_id, state)
        self.blocks.write_window(block_id, history[after : after + WINDOW])

    def _write_attention(self, request: WorkerRequest, hidden: Tensor) -> None:
        positions = torch.arange(request.computed, request.computed + len(hidden))
        _, rows = self.model.attention.project(self.model.norm(hidden), positions)
        self.blocks.write_rows(*self._attention_places(request, positions), rows)

    def _attention_places(self, request: WorkerRequest, positions: Tensor) -> tuple[Tensor, Tensor]:
        table = torch.tensor(request.tables[self.attention_group])
        return table[positions // self.blocks.attention_block], positions % self.blocks.attention_block

    # Sampling.

    def _sample(self, batch: Batch, hidden: list[Tensor]) -> StepResult:
        result = StepResult({}, {}, {})
        for request, x, drafts in zip(batch.requests, hidden, batch.drafts.tolist(), strict=True):
            end = request.computed + len(x)
            inputs = request.inputs(len(x))
            sampled: list[int] = []
            if end - drafts >= request.prefill_len:
                sampled = self._verified_tokens(request, x[-1 - drafts :], inputs[len(x) - drafts :], result)
                request.append_tokens(sampled)
                next_position = len(request.tokens)
                request.drafts = self.sampler.drafts(request.request_id, next_position, self.num_spec)
                result.drafts[request.request_id] = request.drafts
                end -= drafts + 1 - len(sampled)
            result.sampled[request.request_id] = sampled
            request.computed = end
            request.accepted = max(len(sampled), 1)
            self.migration.after(request)
        return result

    def _verified_tokens(self, request: WorkerRequest, x: Tensor, drafts: list[int], result: StepResult) -> list[int]:
        """Sample after the last known token and after each draft, until a draft is wrong."""
        known = len(request.tokens)
        positions = torch.arange(known - 1, known - 1 + len(x))
        q, _ = self.model.attention.project(self.model.norm(x), positions)
        block_ids, offsets = self._attention_places(request, torch.arange(known - 1 + len(x)))
        logits = self.model.logits(x + self.model.attention.attend(q, self.blocks.rows[block_ids, offsets]))
        sampled: list[int] = []
        for i in range(len(x)):
            position = known + i
            token = self.sampler.token(request.request_id, position, logits[i])
            result.logits[request.request_id, position] = logits[i]
            sampled.append(token)
            if i == len(drafts) or drafts[i] != token:
                break
        return sampled
