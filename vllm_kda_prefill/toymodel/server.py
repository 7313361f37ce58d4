# SPDX-License-Identifier: Apache-2.0
"""A whole engine on the CPU: vLLM's scheduler and KV cache manager, and the toy model's worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm_kda_prefill.planning import Engine, Layout
from vllm_kda_prefill.toymodel.model import ToyModel
from vllm_kda_prefill.toymodel.sampler import Sampler
from vllm_kda_prefill.toymodel.worker import StepResult, ToyWorker

WorkerT = TypeVar("WorkerT", bound=ToyWorker)
Observer = Callable[[SchedulerOutput], None]


class Server(Generic[WorkerT]):
    """Serves requests step by step.

    Attributes:
        engine: The scheduler's side.
        worker: The model's side.
        logits: `(request id, position)` -> logits `[vocabulary]` of every token sampled so far.
        in_flight: Scheduled steps that the worker has not run yet, oldest first.
    """

    def __init__(
        self,
        engine: Engine,
        layout: Layout,
        model: ToyModel,
        sampler: Sampler,
        worker_class: type[WorkerT],
    ) -> None:
        scheduler = engine.scheduler
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        config = scheduler.vllm_config
        # The engine core resolves both when it makes the KV cache.
        config.cache_config.hash_block_size = scheduler.hash_block_size
        config.cache_config.cache_hit_alignment_tokens = next(
            m.cache_hit_alignment_tokens for m in managers if isinstance(m, MambaManager)
        )
        attention_block = next(m.block_size for m in managers if not isinstance(m, MambaManager))
        self.engine = engine
        self.worker = worker_class(config, layout.kv_cache_config(), attention_block, model, sampler)
        self.logits: dict[tuple[str, int], Tensor] = {}
        self.in_flight: deque[SchedulerOutput] = deque()
        self._asynchronous = config.scheduler_config.async_scheduling

    def step(self) -> SchedulerOutput:
        """Schedule a step, run it, and report its tokens."""
        output = self.schedule()
        self.run_oldest()
        return output

    def schedule(self) -> SchedulerOutput:
        """Schedule a step without running it."""
        output = self.engine.scheduler.schedule()
        self.in_flight.append(output)
        return output

    def run_oldest(self) -> SchedulerOutput:
        """Run the oldest scheduled step and report its tokens."""
        output = self.in_flight.popleft()
        result = self.worker.execute(output)
        self.logits |= result.logits
        self.report(output, result)
        return output

    def report(self, output: SchedulerOutput, result: StepResult) -> None:
        """Tell the scheduler what a step sampled and guessed."""
        scheduler = self.engine.scheduler
        request_ids = list(result.sampled)
        scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=request_ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
                sampled_token_ids=list(result.sampled.values()),
            ),
        )
        # An asynchronous scheduler counts drafts, and leaves the tokens to the worker.
        if result.drafts and self.worker.num_spec and not self._asynchronous:
            scheduler.update_draft_token_ids(DraftTokenIds(list(result.drafts), list(result.drafts.values())))

    def run(self, observe: Observer | None = None) -> None:
        """Step until nothing is left to do, one step at a time."""
        while self.engine.scheduler.has_requests():
            output = self.step()
            if observe is not None:
                observe(output)
