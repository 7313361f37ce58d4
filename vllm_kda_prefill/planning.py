# SPDX-License-Identifier: Apache-2.0
"""vLLM's real scheduler and KV cache manager on a machine without a GPU.

Model classes are replaced by stubs: planning needs their names and traits, not their CUDA code.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal
from unittest.mock import MagicMock

os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")

# The platform first: see there.
import vllm_kda_prefill.planning_platform  # noqa: F401  # isort: skip

import torch
from torch import nn

from vllm.config import CacheConfig, SchedulerConfig, VllmConfig
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.model_executor.models.registry import ModelRegistry
from vllm.plugins.kda_prefill_coalescing import settings
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.prefill_plan import CHECKPOINT_ALIGNMENT
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.coalescing_scheduler import CoalescingAsyncScheduler, CoalescingScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.state_retention import Policy, Retention
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm_kda_prefill.model_config import make_configs, reading

Arm = Literal["stock", "coalesced"]


class _StubModel(nn.Module, HasInnerState, IsHybrid):
    """What vLLM asks of a hybrid model class while it builds a configuration."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("a stub runs nothing")

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("a stub runs nothing")

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("a stub runs nothing")


@cache
def prepare() -> None:
    """Install the stubs and the fork's settings in this process, once."""
    for architecture in ("Glm5NextForConditionalGeneration", "Glm5NextForCausalLM", "Glm5NextMTPModel"):
        ModelRegistry.register_model(architecture, _StubModel)
    settings.register()
    init_none_hash(sha256)


@dataclass(frozen=True)
class Layout:
    """Everything about an engine that decides what its prefills retain.

    Attributes:
        attention_block: Tokens of one attention block on one rank.
        mamba_block: Tokens of one Mamba block.
        dcp: Decode context parallel ranks, over which an attention block is sharded.
        mtp: Draft tokens of multi-token prediction, 0 for none.
        budget: Tokens of one step.
        num_blocks: Blocks of the KV cache.
        mamba_groups: KV cache groups of KDA layers.
        open_pool: Tokens of the one block that a request has in the group of the indexer's open pool; 0 for no such
            group.
        retention_interval: vLLM's `prefix_cache_retention_interval`.
        block_drop: Force the EAGLE block drop, as with lookahead hashing disabled.
        max_seqs: Requests that run at once.
        long_prefill_threshold: Longest chunk while other requests wait, 0 for no limit.
        scheduling: vLLM's scheduling policy.
        model: Folder of a config.json, default the GLM-5.3-Flash shapes.
    """

    attention_block: int = 512
    mamba_block: int = 512
    dcp: int = 1
    mtp: int = 0
    budget: int = 8192
    num_blocks: int = 2000
    mamba_groups: int = 1
    open_pool: int = 0
    retention_interval: int | None = 0
    block_drop: bool = False
    max_seqs: int = 64
    max_model_len: int = 262144
    long_prefill_threshold: int = 0
    scheduling: Literal["fcfs", "priority"] = "fcfs"
    model: Path | None = None

    def vllm_config(self, asynchronous: bool = False) -> VllmConfig:
        """A configuration that the real scheduler takes; the same object for equal layouts."""
        return _vllm_config(self, asynchronous)

    def _make_vllm_config(self, asynchronous: bool) -> VllmConfig:
        prepare()
        model_config, parallel_config, speculative_config = make_configs(
            self.model,
            tp=self.dcp,
            dcp=self.dcp,
            mtp=self.mtp,
            max_model_len=self.max_model_len,
            disable_lookahead_block_hashes=self.block_drop,
        )
        with reading(self.model):
            config = VllmConfig(
                model_config=model_config,
                cache_config=CacheConfig(
                    enable_prefix_caching=True,
                    block_size=self.attention_block,
                    mamba_block_size=self.mamba_block,
                    prefix_cache_retention_interval=self.retention_interval,
                ),
                scheduler_config=SchedulerConfig(
                    max_num_batched_tokens=self.budget,
                    max_num_seqs=self.max_seqs,
                    max_model_len=self.max_model_len,
                    is_encoder_decoder=False,
                    enable_chunked_prefill=True,
                    long_prefill_token_threshold=self.long_prefill_threshold,
                    policy=self.scheduling,
                    async_scheduling=asynchronous,
                ),
                speculative_config=speculative_config,
                parallel_config=parallel_config,
            )
        config.cache_config.num_gpu_blocks = self.num_blocks
        config.cache_config.block_size = min(self.attention_block, self.mamba_block)
        config.cache_config.mamba_block_size = self.mamba_block
        return config

    def kv_cache_config(self) -> KVCacheConfig:
        """One full-attention group, `mamba_groups` groups of KDA layers and the open pool's, if there is one."""
        attention = FullAttentionSpec(
            block_size=self.attention_block, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
        )
        mamba = MambaSpec(
            block_size=self.mamba_block,
            shapes=((16, 3 + self.mtp), (1, 16, 16)),
            dtypes=(torch.float32, torch.float32),
            mamba_cache_mode="align",
            num_speculative_blocks=self.mtp,
            num_prefill_checkpoint_blocks=1,
            prefill_checkpoint_alignment=CHECKPOINT_ALIGNMENT,
        )
        groups = [KVCacheGroupSpec(["attention"], attention, is_eagle_group=self.mtp > 0)]
        groups += [KVCacheGroupSpec([f"kda.{i}"], mamba) for i in range(self.mamba_groups)]
        if self.open_pool:
            pool = CircularBufferSpec(
                block_size=self.open_pool, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, dcp_sharded=False
            )
            groups.append(KVCacheGroupSpec(["pool"], pool))
        return KVCacheConfig(
            num_blocks=self.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=self.retention_interval,
        )


@cache
def _vllm_config(layout: Layout, asynchronous: bool) -> VllmConfig:
    return layout._make_vllm_config(asynchronous)


@dataclass
class Engine:
    """A scheduler of one arm, with what is needed to feed it requests."""

    scheduler: Any  # stock's scheduler or this fork's, by arm
    hasher: Callable[[Request], list[Any]]
    mtp: int

    @classmethod
    def build(
        cls, layout: Layout, arm: Arm = "coalesced", policy: Policy = "ladder", asynchronous: bool = False
    ) -> Engine:
        """The scheduler that vLLM would run with this layout, stock's or this fork's."""
        config, kv_cache_config = layout.vllm_config(asynchronous), layout.kv_cache_config()
        scheduler_block, hash_block = resolve_kv_cache_block_sizes(kv_cache_config, config)
        classes = {
            "stock": (Scheduler, AsyncScheduler),
            "coalesced": (CoalescingScheduler, CoalescingAsyncScheduler),
        }
        scheduler = classes[arm][asynchronous](
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=MagicMock(**{"validate_tokens.side_effect": lambda _, tokens: tokens}),
            block_size=scheduler_block,
            hash_block_size=hash_block,
            log_stats=True,
        )
        if isinstance(scheduler, CoalescingScheduler):
            scheduler.retention = Retention(scheduler.retention.grid, policy, layout.retention_interval)
        hasher = get_request_block_hasher(hash_block, sha256, config.num_hash_lookahead_tokens)
        return cls(scheduler, hasher, layout.mtp)

    def add(self, request_id: str, tokens: list[int], max_tokens: int = 1, priority: int = 0) -> Request:
        """Queue a request for `max_tokens` output tokens."""
        request = Request(
            request_id,
            tokens,
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            priority=priority,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)
        return request

    def step(self) -> Any:
        """Schedule one step and answer it at once, with token 0 wherever a token is sampled."""
        output = self.scheduler.schedule()
        self.answer(output)
        return output

    def answer(self, output: SchedulerOutput) -> None:
        """Report a step's tokens back, every draft token rejected."""
        request_ids = list(output.num_scheduled_tokens)
        sampled = [[] if self._is_mid_prefill(request_id) else [0] for request_id in request_ids]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=request_ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
                sampled_token_ids=sampled,
            ),
        )

    def _is_mid_prefill(self, request_id: str) -> bool:
        request = self.scheduler.requests[request_id]
        return request.num_computed_tokens < request.num_tokens
