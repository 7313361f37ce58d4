# SPDX-License-Identifier: Apache-2.0
"""The GPU worker that passes each step's plans on to the model state."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.mamba.ops.kda_prefill import ExportingLayer
from vllm.v1.core.prefill_plan import plans_of
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.model_states.checkpointed_mamba_hybrid import CheckpointedMambaHybridModelState
from vllm.v1.worker.gpu_worker import Worker


class CoalescingWorker(Worker):
    """vLLM's GPU worker with the one thing its model runner does not hand to a model state: the plans."""

    _warming_up = False

    def compile_or_warm_up_model(self) -> Any:
        # First: at the end of its own, stock begins to watch for compilations, which may be an error from then on.
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            if isinstance(layer, ExportingLayer):
                layer.warm_up_export()
        # Warm-up executes scheduler outputs of the worker's own making: no scheduler planned them.
        self._warming_up = True
        try:
            return super().compile_or_warm_up_model()
        finally:
            self._warming_up = False

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        if not self._warming_up:
            model_state = self.model_runner.model_state  # type: ignore[attr-defined]  # the V2 runner's
            assert isinstance(model_state, CheckpointedMambaHybridModelState)
            model_state.set_plans(plans_of(scheduler_output))
        return super().execute_model(scheduler_output)
