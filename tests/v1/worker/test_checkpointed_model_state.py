# SPDX-License-Identifier: Apache-2.0
"""What the metadata builders are bound to while a batch's metadata is built, and how often they are bound."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

mamba_hybrid = pytest.importorskip(
    "vllm.v1.worker.gpu.model_states.mamba_hybrid", reason="stock's GPU model states do not import here"
)

from vllm.plugins.kda_prefill_coalescing import settings  # noqa: E402
from vllm.v1.attention.backends.checkpoint_rows import NOTHING  # noqa: E402
from vllm.v1.attention.backends.gdn_checkpoint import CheckpointedGDNMetadataBuilder  # noqa: E402
from vllm.v1.core import prefill_plan  # noqa: E402
from vllm.v1.core.prefill_plan import PlanMismatchError, PrefillPlan  # noqa: E402
from vllm.v1.worker.gpu.model_states.checkpointed_mamba_hybrid import (  # noqa: E402
    CheckpointedMambaHybridModelState,
)

PLAN = PrefillPlan(0, 1024, (512,), {1: (30,), 2: (31,)})


class Builder(CheckpointedGDNMetadataBuilder):
    """A builder that only remembers what it is bound to."""

    def __init__(self) -> None:
        self.rows: Any = None
        self.group_id = 0
        self.binds = 0

    def bind(self, rows, group_id):
        self.rows, self.group_id = rows, group_id
        self.binds += 1


class Batches:
    """A model state, the builders of its two recurrent groups, and what they were bound to in each batch."""

    def __init__(self) -> None:
        self.builders = [Builder(), Builder()]
        group = [SimpleNamespace(get_metadata_builder=lambda _, b=b: b) for b in (object(), *self.builders)]
        self.groups: list[Any] = [[one] for one in group]
        self.state = CheckpointedMambaHybridModelState.__new__(CheckpointedMambaHybridModelState)

    def prepare(self, plans: dict[str, PrefillPlan] | None, groups=None, **options) -> list[Any]:
        """What the builders were bound to while stock built a batch of one request of 1,024 tokens."""
        if plans is not None:
            self.state.set_plans(plans)
        batch = SimpleNamespace(
            req_ids=["a"],
            num_computed_tokens_np=np.array([0]),
            num_scheduled_tokens=np.array([1024]),
            query_start_loc_np=np.array([0, 1024]),
        )
        rest: Any = (None, (), None, self.groups if groups is None else groups, SimpleNamespace(num_blocks=40))
        return self.state.prepare_attn(batch, *rest, **options)  # type: ignore[arg-type, return-value]


@pytest.fixture
def batches(monkeypatch):
    settings.register()
    made = Batches()
    monkeypatch.setattr(
        mamba_hybrid.MambaHybridModelState,
        "prepare_attn",
        lambda *_, **__: [builder.rows for builder in made.builders],
    )
    return made


def test_a_batch_that_was_not_announced_goes_by_stocks_rule(batches):
    assert batches.prepare(None) == [None, None]


def test_an_announced_batch_without_plans_exports_nothing(batches):
    assert batches.prepare({}) == [NOTHING, NOTHING]


def test_a_plan_is_bound_for_its_batch_alone(batches):
    rows = batches.prepare({"a": PLAN})
    own = [bound.block_ids[builder.group_id].tolist() for bound, builder in zip(rows, batches.builders, strict=True)]
    assert own == [[[30, 0, 0, 0]], [[31, 0, 0, 0]]]
    assert batches.prepare({}) == [NOTHING, NOTHING]
    batches.prepare({"a": PLAN})
    assert batches.prepare(None) == [None, None]


def test_plans_are_taken_once(batches):
    batches.prepare({"a": PLAN})
    assert batches.prepare(None, for_capture=True) == [None, None]


def test_a_capture_binds_no_plan(batches):
    assert batches.prepare({"a": PLAN}, for_capture=True) == [NOTHING, NOTHING]


def test_decode_steps_bind_nothing_again(batches):
    for _ in range(3):
        batches.prepare({})
    assert [builder.binds for builder in batches.builders] == [1, 1]


def test_a_batch_of_other_groups_between_is_no_reason_to_skip(batches):
    batches.prepare({"a": PLAN})
    # Warm-up batches may leave out the recurrent groups.
    batches.prepare(None, groups=batches.groups[:1])
    assert batches.prepare(None) == [None, None]


def test_new_builders_are_bound(batches):
    batches.prepare({})
    batches.builders[:] = [Builder(), Builder()]
    again = [[SimpleNamespace(get_metadata_builder=lambda _, b=b: b)] for b in batches.builders]
    assert batches.prepare({}, groups=again) == [NOTHING, NOTHING]


def test_a_plan_that_does_not_fit_leaves_nothing_bound(batches):
    wrong = PrefillPlan(0, 1536, (512,), PLAN.block_ids)
    with pytest.raises(PlanMismatchError):
        batches.prepare({"a": wrong})
    assert [builder.rows for builder in batches.builders] == [NOTHING, NOTHING]
    assert batches.prepare(None) == [None, None]


@pytest.mark.parametrize(("limit", "logged"), [(0, 0), (2, 2)])
def test_what_a_rank_exports_is_logged_up_to_the_limit(batches, monkeypatch, limit, logged):
    lines: list[str] = []
    log = SimpleNamespace(info=lambda message, *values: lines.append(message % values))
    monkeypatch.setattr(prefill_plan, "logger", log)
    monkeypatch.setenv(settings.LOG_LIMIT, str(limit))
    for _ in range(3):
        batches.prepare({"a": PLAN})
        batches.prepare({})
    line = "KDA prefill rows: request a in row 0, query [0, 1024), offsets [512], blocks {1: [30], 2: [31]}"
    assert lines == [line] * logged
