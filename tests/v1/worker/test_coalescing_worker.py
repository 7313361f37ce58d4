# SPDX-License-Identifier: Apache-2.0
"""The worker hands every real step's plans on, and knows vLLM's warm-up from a step without plans."""

import pytest

gpu_worker = pytest.importorskip("vllm.v1.worker.gpu_worker", reason="stock's GPU worker does not import here")

from types import SimpleNamespace  # noqa: E402
from typing import Any  # noqa: E402

from vllm.models.glm5next.coalesced import CoalescedLinearAttention  # noqa: E402
from vllm.v1.core.prefill_plan import PLANS_ATTRIBUTE, PlanMismatchError, PrefillPlan  # noqa: E402
from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.worker.coalescing_worker import CoalescingWorker  # noqa: E402
from vllm.v1.worker.gpu.model_states.checkpointed_mamba_hybrid import (  # noqa: E402
    CheckpointedMambaHybridModelState,
)

PLAN = PrefillPlan(0, 1024, (512,), {1: (30,)})


@pytest.fixture
def worker(monkeypatch):
    worker = CoalescingWorker.__new__(CoalescingWorker)
    state = CheckpointedMambaHybridModelState.__new__(CheckpointedMambaHybridModelState)
    worker.model_runner = SimpleNamespace(model_state=state)  # type: ignore[assignment]
    warmed_up: list[CoalescedLinearAttention] = []
    worker.warmed_up = warmed_up  # type: ignore[attr-defined]
    layers = {"kda.0": CoalescedLinearAttention.__new__(CoalescedLinearAttention), "mla.1": object()}
    compilation: Any = SimpleNamespace(static_forward_context=layers)
    worker.vllm_config = SimpleNamespace(compilation_config=compilation)  # type: ignore[assignment]

    def warm_up_export(layer):
        warmed_up.append(layer)

    monkeypatch.setattr(CoalescedLinearAttention, "warm_up_export", warm_up_export)
    monkeypatch.setattr(gpu_worker.Worker, "execute_model", lambda self, output: "done")
    monkeypatch.setattr(
        gpu_worker.Worker,
        "compile_or_warm_up_model",
        lambda self: self.execute_model(SchedulerOutput.make_empty()),
    )
    return worker


def test_a_steps_plans_reach_the_model_state(worker):
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens["a"] = 1024
    setattr(output, PLANS_ATTRIBUTE, {"a": PLAN})
    assert worker.execute_model(output) == "done"
    assert worker.model_runner.model_state._plans == {"a": PLAN}


@pytest.mark.parametrize(("request_id", "tokens"), [("a", 1023), ("b", 1024)])
def test_a_plan_for_another_step_never_reaches_the_runner(worker, monkeypatch, request_id, tokens):
    ran = []
    monkeypatch.setattr(gpu_worker.Worker, "execute_model", lambda self, output: ran.append(output))
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens[request_id] = tokens
    setattr(output, PLANS_ATTRIBUTE, {"a": PLAN})
    with pytest.raises(PlanMismatchError, match=r"request a for \[0, 1024\) at \[512\]"):
        worker.execute_model(output)
    assert not ran


def test_exports_are_compiled_before_stock_watches_compilations(worker, monkeypatch):
    when_watched = []
    monkeypatch.setattr(gpu_worker.Worker, "compile_or_warm_up_model", lambda self: when_watched.extend(self.warmed_up))
    worker.compile_or_warm_up_model()
    assert when_watched == [worker.vllm_config.compilation_config.static_forward_context["kda.0"]]


def test_warm_up_needs_no_plans_and_a_step_does(worker):
    assert worker.compile_or_warm_up_model() == "done"
    assert worker.model_runner.model_state._plans is None
    with pytest.raises(PlanMismatchError, match="carries no KDA prefill plans"):
        worker.execute_model(SchedulerOutput.make_empty())
