# SPDX-License-Identifier: Apache-2.0
"""Stock vLLM keeping as many states as policy `ladder`, the only way it can: by ending queries.

For `vllm serve --scheduler-cls` with the gate off. A prefill chunk ends at the next checkpoint position of its
prompt. The state of each chunk's end is kept, by a retention interval of one scheduler block. Everything else is
stock's scheduler.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.v1.core.lookup_grid import lookup_grid
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.state_retention import Retention
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request


class StoppingScheduler(Scheduler):
    """Ends queries at the checkpoint positions of `ladder`, but for the deepest: stock keeps that one in any case."""

    def __init__(self, *, kv_cache_config: KVCacheConfig, block_size: int, **kwargs: Any) -> None:
        # Set here, since the size of a scheduler block is known here: with DCP it is a block times its ranks.
        every_end = replace(kv_cache_config, prefix_cache_retention_interval=block_size)
        super().__init__(kv_cache_config=every_end, block_size=block_size, **kwargs)
        self._retention = Retention(lookup_grid(self.kv_cache_manager.coordinator))

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        hits = (num_new_local_computed_tokens, num_external_computed_tokens)
        start = request.num_computed_tokens + sum(hits)
        if start < request.num_prompt_tokens:
            stops = self._retention.checkpoint_positions(request.num_prompt_tokens)[:-1]
            nearest = min((stop for stop in stops if stop > start), default=start + num_new_tokens)
            num_new_tokens = min(num_new_tokens, nearest - start)
        return super()._mamba_block_aligned_split(request, num_new_tokens, *hits)


class StoppingAsyncScheduler(StoppingScheduler, AsyncScheduler):
    """The same for asynchronous scheduling."""


def end_at_checkpoints(**kwargs: Any) -> Scheduler:
    """The scheduler of arm `equal`."""
    asynchronous = kwargs["vllm_config"].scheduler_config.async_scheduling
    return (StoppingAsyncScheduler if asynchronous else StoppingScheduler)(**kwargs)
