# SPDX-License-Identifier: Apache-2.0
"""Every place where this fork meets stock vLLM, in one table.

A row says where, why, and what change upstream would let it go. Rows that override or rely on the inside of an
upstream function also name that source with its digest (`upstream_sources`). If an installed vLLM differs there,
nobody has checked that the override still means the same, and the engine does not start.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.plugins.kda_prefill_coalescing import block_layout, config_check, index_rows, settings
from vllm.plugins.kda_prefill_coalescing.upstream_sources import check_upstream

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Patch:
    """One row of the table.

    Attributes:
        name: What it is called.
        how: Which of vLLM's registries or hooks it uses, or what it rebinds.
        why: What it is for.
        goes_when: The upstream change that would make it unnecessary.
        upstream: `module:qualified name` of each upstream source it was written against -> its digest.
        bind: Puts it in place; runs once a process. None where another row's object brings it along.
        always: Whether the row is also bound with the gate off, when its own settings are given.
    """

    name: str
    how: str
    why: str
    goes_when: str
    upstream: Mapping[str, str] = field(default_factory=dict)
    bind: Callable[[], None] | None = None
    always: bool = False


def _register_models() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture in block_layout.MODELS:
        ModelRegistry.register_model(architecture, f"vllm.models.glm5next.coalesced:Coalesced{architecture}")


def _rebind_config_update() -> None:
    from vllm.config import VllmConfig

    stock = VllmConfig.try_verify_and_update_config

    @functools.wraps(stock)
    def update_and_check(vllm_config: VllmConfig) -> None:
        # Stock marks a model that it has seen. More configurations of it, once one was accepted, are copies for a
        # part of the engine, such as a drafter with a cache dtype of its own, and not what the engine serves with.
        seen = getattr(vllm_config.model_config, "config_updated", False)
        stock(vllm_config)
        if not (seen and vllm_config.scheduler_config.scheduler_cls == config_check.SCHEDULER):
            config_check.check(vllm_config)

    VllmConfig.try_verify_and_update_config = update_and_check  # type: ignore[method-assign]


def _rebind_stat_loggers() -> None:
    import vllm.v1.metrics.loggers as loggers

    stock = loggers.load_stat_logger_plugin_factories

    @functools.wraps(stock)
    def load_factories() -> list[Any]:
        from vllm.v1.metrics.kda_prefill import with_kda_prefill_logger

        return with_kda_prefill_logger(stock())

    loggers.load_stat_logger_plugin_factories = load_factories
    # The API server imports the engine client, and with it the function, before it loads plugins.
    client = sys.modules.get("vllm.v1.engine.async_llm")
    if client is not None:
        client.load_stat_logger_plugin_factories = load_factories  # type: ignore[attr-defined]


PATCHES = (
    Patch(
        name="settings",
        how="registry: vllm.envs.environment_variables",
        why="the fork's variables are read like vLLM's own",
        goes_when="vLLM has the variables",
        bind=settings.register,
        always=True,
    ),
    Patch(
        name="split layout",
        how="rebinds Platform._align_hybrid_block_size, calling it where the settings do not apply",
        why="attention and Mamba blocks keep their own size; with the gate on, final blocks that are too coarse "
        "for 8K spans are refused",
        goes_when="vLLM lets a hybrid model's block sizes differ",
        upstream={
            "vllm.platforms.interface:Platform._align_hybrid_block_size": "e71decc57e98f69b",
            "vllm.platforms.interface:Platform.update_block_size_for_backend": "9d18d1460b86a022",
        },
        bind=block_layout.rebind,
        always=True,
    ),
    Patch(
        name="index rows",
        how="rebinds vllm.utils.deep_gemm.get_paged_mqa_page_sizes, and its name in the indexer's module",
        why="blocks of 512 tokens on SM12x, 32 rows of the pooled index: the DeepGEMM in the wheel reads tiles of 32 "
        "there too, and stock lists 64 alone",
        goes_when="vLLM lists 32 rows on SM12x",
        upstream={
            "vllm.utils.deep_gemm:get_paged_mqa_page_sizes": "0963e89e0c33dcd4",
            "vllm.utils.deep_gemm:_import_deep_gemm": "78805dc9c797a18c",
            "vllm.v1.attention.backends.mla.indexer:Glm5NextIndexerBackend": "b37ed55aa48ad1a4",
            "vllm/third_party/deep_gemm/include/deep_gemm/impls/sm120_fp8_paged_mqa_logits.cuh": "bbf7f7fb397adaa5",
            "vllm/third_party/deep_gemm/include/deep_gemm/scheduler/sm120_paged_mqa_logits.cuh": "6d11444e533a7ade",
        },
        bind=index_rows.rebind,
        always=True,
    ),
    Patch(
        name="config check",
        how="rebinds VllmConfig.try_verify_and_update_config, calling it first",
        why="refuses what cannot coalesce before weights load, and names scheduler and worker for what can; "
        "the registry of config hooks goes by architecture, and other architectures must be refused too",
        goes_when="vLLM has a hook for plugins to check a finished configuration",
        upstream={"vllm.config.vllm:VllmConfig.try_verify_and_update_config": "a3cf210dbc5dbd3c"},
        bind=_rebind_config_update,
    ),
    Patch(
        name="scheduler",
        how="hook: SchedulerConfig.scheduler_cls; subclass of Scheduler and AsyncScheduler",
        why="proposes the span without stops for states, binds plans when the step is final, withdraws a preempted "
        "chunk's cache entries, and all entries after a fault that the engine survives",
        goes_when="stock's scheduler exports more than one state a query",
        upstream={
            "vllm.v1.core.sched.scheduler:Scheduler.schedule": "fa34c8a13c0a8936",
            "vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split": "9af6739dbbdf081f",
            "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule": "2b527eb8070d3cce",
            "vllm.v1.core.sched.scheduler:Scheduler._preempt_request": "8d67cc4e85688724",
            "vllm.v1.core.sched.scheduler:Scheduler._free_cow_retained_blocks": "2ac7586b370e740f",
            "vllm.v1.fault_tolerance.engine_core_sentinel:EngineCoreSentinel.on_fault": "6b37ad4d7e887711",
            "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule": "138d47daea23cdfd",
        },
    ),
    Patch(
        name="KV cache manager",
        how="the scheduler's own KVCacheManager takes on a subclass after it is built",
        why="grants exports their blocks, and makes a request wait that would copy an unwritten attention block",
        goes_when="the faults in docs/upstream.md are fixed and stock grants more than one checkpoint block",
        upstream={
            "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": "8c60d937fd9eb0c8",
            "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks": "ae0e67c0720ab760",
            "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.get_num_blocks_to_allocate": "4500949e3f03d550",
            "vllm.v1.core.single_type_kv_cache_manager:MambaManager": "ef8c0683976abfec",
        },
    ),
    Patch(
        name="attention manager",
        how="the coordinator's own FullAttentionManager takes on a subclass where its blocks are wider than hits",
        why="under DCP an attention block is also cached under Mamba boundaries inside it, so that every state can be "
        "hit",
        goes_when="stock caches an attention block under each boundary inside it that a state may have",
        upstream={
            "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager": "aebe22ab01bf5786",
            "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager": "36aff2c13acd2797",
            "vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.find_longest_cache_hit": "0d109ac725cf33e2",
        },
    ),
    Patch(
        name="free list",
        how="the block pool's free queue is replaced before the first request",
        why="probationary states beyond their quota are evicted before protected entries",
        goes_when="vLLM's free queue has eviction priorities",
        upstream={
            "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue": "9849f2e9a6e41fba",
            "vllm.v1.core.block_pool:BlockPool": "c176c238dbe9a621",
        },
    ),
    Patch(
        name="models",
        how="registry: ModelRegistry.register_model",
        why="brings along the KDA layer and the model state",
        goes_when="stock's model has both",
        bind=_register_models,
    ),
    Patch(
        name="KDA layer",
        how="registry: PluggableLayer.register_oot; a subclass of Glm5NextLinearAttention that runs stock's _forward "
        "with other functions for the copies of states",
        why="exports every planned state, and leaves states in the pool where the kernel reads and writes them there; "
        "weights and cache specs stay stock's",
        goes_when="stock's KDA layer exports more than one state a query and hands the kernel the pool",
        upstream={
            "vllm.models.glm5next.common.kda:Glm5NextLinearAttention": "4164dd69ce7117d1",
            "vllm.model_executor.custom_op:PluggableLayer": "3244520d0a1a1f26",
            "vllm.compilation.breakable_cudagraph:eager_break_during_capture": "59d8049822d7fe71",
            "vllm.model_executor.layers.mamba.ops.gather_initial_states:gather_initial_states": "b0d69d2952420a27",
            "vllm.model_executor.layers.mamba.ops.scatter_states:scatter_states": "2d759be9fe05b9c7",
        },
    ),
    Patch(
        name="selection merge",
        how="rebinds _merge_dcp_topk_global under every name it is called by, when the text model is built",
        why="the ranks' indexers may select any number of rows up to 2,048; stock merges 512, 1,024 or 2,048, and this "
        "model selects 128",
        goes_when="stock's merge takes any number of rows (docs/upstream.md, fault 7)",
        upstream={
            "vllm.model_executor.layers.sparse_attn_indexer:_merge_dcp_topk_global": "fc5bdaa8ce147927",
            "vllm.model_executor.layers.sparse_attn_indexer:sparse_attn_indexer": "ba1f34f27484150e",
            "vllm.model_executor.layers.sparse_attn_indexer:SparseAttnIndexer": "a76783d45e1534e1",
            "vllm.models.glm5next.nvidia.sparse_indexer:sparse_attn_indexer_kpool": "21704f6c4d68a19a",
            "vllm.models.glm5next.nvidia.sparse_indexer:SparseAttnIndexerKpool": "f64aa02d6a105f6d",
            "vllm.v1.attention.backends.mla.sparse_utils:triton_filter_and_convert_dcp_index": "4f098dfcb0035bb3",
        },
    ),
    Patch(
        name="metadata builder",
        how="hook: MambaBase.get_attn_backend; subclass of GDNAttentionMetadataBuilder",
        why="gives [rows, 4] offsets and state indices from plans instead of deriving one checkpoint from lengths",
        goes_when="stock's checkpoint metadata comes from the scheduler",
        upstream={
            "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder": "293288613e054036",
            "vllm.model_executor.layers.mamba.checkpoint:MambaPrefillCheckpointBuilder": "d285379fb1d2de8e",
            "vllm.model_executor.layers.mamba.checkpoint:MambaPrefillCheckpointMetadata": "aab5af6ce52d1d46",
        },
    ),
    Patch(
        name="model state",
        how="hook: model.get_model_state_cls; subclass of MambaHybridModelState",
        why="maps plans to packed rows and raises where a row differs from its plan",
        goes_when="stock's model state takes checkpoint plans",
        upstream={
            "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState.prepare_attn": "b0e46b5563d5bb63"
        },
    ),
    Patch(
        name="worker",
        how="hook: ParallelConfig.worker_cls; subclass of Worker",
        why="hands a step's plans to the model state, which the model runner passes no scheduler output",
        goes_when="the model runner passes the scheduler output to its model state",
        upstream={"vllm.v1.worker.gpu_worker:Worker.execute_model": "782126ba48e7e116"},
    ),
    Patch(
        name="metrics",
        how="rebinds load_stat_logger_plugin_factories, calling it first",
        why="the planner's counters appear in /metrics; an entry point of the plugin group would be loaded with "
        "the gate off too",
        goes_when="stat logger plugins can be registered at run time; and SchedulerStats has a field for the counters "
        "of a scheduler subclass, which travel in waiting_lora_adapters until then (docs/upstream.md)",
        upstream={"vllm.v1.metrics.loggers:load_stat_logger_plugin_factories": "94a131a520982a69"},
        bind=_rebind_stat_loggers,
    ),
)

UPSTREAM = tuple((target, digest) for patch in PATCHES for target, digest in patch.upstream.items())
"""Every upstream source behind the patches, with its digest."""


@functools.cache
def bind(coalescing: bool = True) -> None:
    """Check the installed vLLM and put the patches in place, once a process.

    Args:
        coalescing: Whether the gate is on; with the gate off, only the rows that need no gate are bound.
    """
    check_upstream(UPSTREAM)
    for patch in PATCHES:
        if patch.bind is not None and (coalescing or patch.always):
            patch.bind()
