# SPDX-License-Identifier: Apache-2.0
"""What vLLM's real scheduler and KV cache manager do with one prompt, coalesced and stock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

# The platform first: see there.
import vllm_kda_prefill.planning_platform  # noqa: F401  # isort: skip

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.state_retention import LookupGrid, Policy
from vllm.v1.request import Request
from vllm_kda_prefill.planning import Arm, Engine, Layout
from vllm_kda_prefill.spans import QuerySpan, mamba_managers, query_span, retained_states


class UnreachableHitError(ValueError):
    """A prefix hit that this layout cannot give; the message names the nearest that it can."""


@dataclass(frozen=True)
class ArmReport:
    """One scheduler's way with the prompt.

    Attributes:
        spans: The prompt's queries, one a pass.
        retained: States of the prompt that the prefix cache holds afterwards, in tokens.
    """

    spans: tuple[QuerySpan, ...]
    retained: tuple[int, ...]

    @property
    def passes(self) -> int:
        return len(self.spans)

    def as_json(self) -> dict[str, Any]:
        return {
            "spans": [asdict(span) for span in self.spans],
            "retained": list(self.retained),
            "passes": self.passes,
        }


@dataclass(frozen=True)
class PlanReport:
    """Both arms, and what the difference is worth.

    Attributes:
        mamba_block: Tokens of a Mamba block.
        lookup: Every prefix hit is a multiple of this many tokens.
        scheduler: The scheduler's block in tokens.
        unreachable: Retained states that no lookup can return in this layout.
        equal_retention_passes: Passes that stock needs to retain the coalesced arm's states.
        bytes_per_state: Bytes of one retained state, over all KDA layers and ranks.
    """

    prompt: int
    cached: int
    policy: Policy
    mamba_block: int
    lookup: int
    scheduler: int
    coalesced: ArmReport
    stock: ArmReport
    unreachable: tuple[int, ...]
    equal_retention_passes: int
    bytes_per_state: int

    def as_json(self) -> dict[str, Any]:
        layout = {"mamba_block": self.mamba_block, "lookup": self.lookup, "scheduler": self.scheduler}
        return {
            "prompt": self.prompt,
            "cached": self.cached,
            "policy": self.policy,
            "layout": layout,
            **self.coalesced.as_json(),
            "unreachable": list(self.unreachable),
            "stock": self.stock.as_json(),
            "equal_retention_passes": self.equal_retention_passes,
            "bytes_per_state": self.bytes_per_state,
        }


def make_report(layout: Layout, policy: Policy, prompt: int, cached: int = 0) -> PlanReport:
    """Serve a prompt of `prompt` tokens, of which `cached` are in the prefix cache, with both schedulers.

    Raises:
        UnreachableHitError: No prompt can leave exactly `cached` tokens of this one in the cache.
    """
    engine = Engine.build(layout, "coalesced", policy)
    grid: LookupGrid = engine.scheduler.retention.grid  # type: ignore[attr-defined]
    tokens = list(range(prompt))
    head = _prompt_that_leaves(grid, prompt, cached)
    coalesced, request = _serve(engine, tokens, head)
    stock, _ = _serve(Engine.build(layout, "stock"), tokens, head)
    for arm in (coalesced, stock):
        if arm.spans[0].start != cached:
            raise UnreachableHitError(f"no prefix hit of {cached} tokens in this layout; nearest: {arm.spans[0].start}")
    wanted = [position for position in coalesced.retained if position > cached]
    return PlanReport(
        prompt=prompt,
        cached=cached,
        policy=policy,
        mamba_block=grid.mamba_block,
        lookup=grid.hit_alignment,
        scheduler=grid.scheduler_block,
        coalesced=coalesced,
        stock=stock,
        unreachable=tuple(p for p in coalesced.retained if not grid.is_reachable(p, request.num_prompt_tokens)),
        equal_retention_passes=_equal_retention_passes(layout, tokens, head, wanted),
        bytes_per_state=bytes_per_state(engine),
    )


def _prompt_that_leaves(grid: LookupGrid, prompt: int, cached: int) -> int:
    """Length of the prompt whose tail state is at `cached`; 0 where nothing is to be cached."""
    if cached == 0:
        return 0
    tail = grid.tail(prompt)
    if cached % grid.hit_alignment or not 0 < cached <= tail:
        below = max(min(cached, tail) // grid.hit_alignment * grid.hit_alignment, 0)
        above = below + grid.hit_alignment
        nearest = f"{below} or {above}" if above <= tail else str(below)
        raise UnreachableHitError(
            f"no prefix hit of {cached} tokens in a prompt of {prompt}: hits are multiples of "
            f"{grid.hit_alignment} up to {tail}; nearest: {nearest}"
        )
    past = grid.hit_alignment if grid.drop_block else max(1, grid.hash_lookahead)
    return cached + past


def _serve(engine: Engine, tokens: list[int], head: int) -> tuple[ArmReport, Request]:
    if head:
        engine.add("earlier", tokens[:head])
        while engine.scheduler.has_unfinished_requests():
            engine.step()
    request = engine.add("prompt", tokens)
    spans = []
    while engine.scheduler.has_unfinished_requests():
        output = engine.scheduler.schedule()
        span = query_span(engine, output, "prompt")
        assert span is not None, "a lone prompt was not scheduled"
        spans.append(span)
        engine.answer(output)
    return ArmReport(tuple(spans), retained_states(engine, request)), request


def _equal_retention_passes(layout: Layout, tokens: list[int], head: int, wanted: Sequence[int]) -> int:
    """Passes of stock's scheduler when it ends a query at each wanted state that it would not keep."""
    stops: tuple[int, ...] = ()
    while True:
        arm = StoppingEngine.build(layout, stops)
        report, _ = _serve(arm, tokens, head)
        ends = {span.end for span in report.spans}
        missing = [position for position in wanted if position not in ends | set(report.retained)]
        if not missing:
            return report.passes
        # The deepest state comes with the last query for free, so stop at the shallowest missing one first.
        stops = (*stops, missing[0])


class StoppingEngine(Engine):
    """Stock's engine, its scheduler told where to end queries."""

    @classmethod
    def build(  # type: ignore[override]
        cls, layout: Layout, stops: Sequence[int], arm: Arm = "stock"
    ) -> StoppingEngine:
        engine = super().build(layout, arm)
        scheduler = engine.scheduler
        split = scheduler._mamba_block_aligned_split

        def split_at_stops(request: Request, num_new_tokens: int, *computed: int) -> int:
            start = request.num_computed_tokens + sum(computed)
            nearest = min((stop for stop in stops if stop > start), default=None)
            if nearest is not None:
                num_new_tokens = min(num_new_tokens, nearest - start)
            return split(request, num_new_tokens, *computed)

        vars(scheduler)["_mamba_block_aligned_split"] = split_at_stops
        return cls(engine.scheduler, engine.hasher, engine.mtp)


def bytes_per_state(engine: Engine) -> int:
    """Bytes of one retained state over all KDA layers and ranks: fp32 states and bf16 convolution windows."""
    scheduler: Scheduler = engine.scheduler
    config = scheduler.vllm_config.model_config.hf_text_config
    heads, size = config.linear_num_heads, config.linear_head_dim
    layers = list(config.layer_types).count("linear_attention")
    state = heads * size * size * 4
    window = (config.linear_conv_kernel_dim - 1) * 3 * heads * size * 2
    assert mamba_managers(scheduler.kv_cache_manager), "a layout without recurrent groups retains nothing"
    return layers * (state + window)
