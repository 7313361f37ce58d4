# SPDX-License-Identifier: Apache-2.0
"""Whether an engine configuration can coalesce KDA prefill, and what it needs to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

import vllm.envs as envs
from vllm.kda_prefill_variables import GATE
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.plugins.kda_prefill_coalescing.block_layout import MODELS, unmet_by_layout, warn_unless_spans_are_whole
from vllm.plugins.kda_prefill_coalescing.dcp_check import unmet_by_dcp, unmet_by_heads
from vllm.v1.core.prefill_plan import CHECKPOINT_ALIGNMENT

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

SCHEDULER = "vllm.v1.core.sched.coalescing_scheduler.create_scheduler"
WORKER = "vllm.v1.worker.coalescing_worker.CoalescingWorker"
BACKEND = '"kda_prefill_backend" in --additional-config'
WITHOUT_BACKEND = 'leave "kda_prefill_backend" out of --additional-config'
STOCK_WORKERS = ("auto", "vllm.v1.worker.gpu_worker.Worker")
KERNEL_CAPABILITIES = (9, 10, 12)
"""Major compute capabilities with a kernel that exports states: Hopper, Blackwell and its consumer parts."""


def unmet_conditions(vllm_config: VllmConfig) -> Iterator[str]:
    """Name each condition that `vllm_config` does not meet, with the way to meet it."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    speculative = vllm_config.speculative_config
    scheduler_cls = vllm_config.scheduler_config.scheduler_cls
    conditions = (
        (
            model.architecture in MODELS,
            f"the model is {model.architecture}, not GLM-5.3-Flash ({' or '.join(MODELS)}): serve it with {GATE}=0",
        ),
        (model.runner_type == "generate", f"the runner is {model.runner_type}: leave out --runner"),
        (model.dtype == torch.bfloat16, f"the dtype is {model.dtype}: pass --dtype bfloat16"),
        (cache.enable_prefix_caching, "prefix caching is off: pass --enable-prefix-caching"),
        (
            not cache.enable_prefix_caching or cache.mamba_cache_mode in ("align", "none"),
            f"the Mamba cache mode is {cache.mamba_cache_mode}: pass --mamba-cache-mode align",
        ),
        (
            cache.mamba_cache_dtype in ("auto", "bfloat16"),
            f"the convolution window's dtype is {cache.mamba_cache_dtype}, exports copy bfloat16: "
            "leave out --mamba-cache-dtype",
        ),
        (
            cache.mamba_ssm_cache_dtype in ("auto", "float32"),
            f"the recurrent state's dtype is {cache.mamba_ssm_cache_dtype}, the kernels write float32: "
            "leave out --mamba-ssm-cache-dtype",
        ),
        (
            cache.prefix_match_unit is None or cache.prefix_match_unit % CHECKPOINT_ALIGNMENT == 0,
            f"the prefix match unit is {cache.prefix_match_unit} tokens: pass --prefix-match-unit "
            f"{CHECKPOINT_ALIGNMENT}, a multiple, or leave it out",
        ),
        (not envs.VLLM_BATCH_INVARIANT, "batch invariance is on, which KDA does not have: unset VLLM_BATCH_INVARIANT"),
        (vllm_config.use_v2_model_runner, "model runner V1 is in use: set VLLM_USE_V2_MODEL_RUNNER=1"),
        (not parallel.enable_expert_parallel, "expert parallelism is on: leave out --enable-expert-parallel"),
        (vllm_config.lora_config is None, "LoRA is on: leave out --enable-lora"),
        (
            not _uses_hisparse(vllm_config),
            "HiSparse keeps attention's blocks in a pool of its own: leave HiSparseConnector out of "
            "--kv-transfer-config, and hisparse_config out of --attention-config",
        ),
        (not model.enable_sleep_mode, "sleep mode is on: leave out --enable-sleep-mode"),
        (
            speculative is None or not speculative.num_speculative_tokens_per_batch_size,
            "speculation is dynamic: leave num_speculative_tokens_per_batch_size out of --speculative-config",
        ),
        (
            scheduler_cls in (None, SCHEDULER),
            f"the scheduler is {scheduler_cls}: leave out --scheduler-cls",
        ),
        (
            parallel.worker_cls in (*STOCK_WORKERS, WORKER),
            f"the worker is {parallel.worker_cls}: leave out --worker-cls",
        ),
    )
    yield from (message for met, message in conditions if not met)
    for name in ("pipeline", "data", "prefill_context"):
        size = getattr(parallel, f"{name}_parallel_size")
        if size > 1:
            words, flag = name.replace("_", " "), name.replace("_", "-")
            yield f"{words} parallel size is {size}: pass --{flag}-parallel-size 1"
    yield from unmet_by_kernel(vllm_config)
    if model.architecture in MODELS:
        shared_out = list(unmet_by_heads(vllm_config))
        yield from shared_out
        if not shared_out:  # A rank's part of a state has no size else.
            yield from unmet_by_layout(vllm_config)
            yield from unmet_by_dcp(vllm_config)


def _uses_hisparse(vllm_config: VllmConfig) -> bool:
    # Stock infers its configuration from the connector, but only after this check.
    transfer = vllm_config.kv_transfer_config
    configured = vllm_config.attention_config.hisparse_config is not None
    return configured or (transfer is not None and transfer.has_connector("HiSparseConnector"))


def backend_choice(vllm_config: VllmConfig) -> str:
    """The KDA prefill backend that `--additional-config` names, `auto` by default."""
    additional = vllm_config.additional_config
    return additional.get("kda_prefill_backend", "auto") if isinstance(additional, dict) else "auto"


def unmet_by_kernel(vllm_config: VllmConfig) -> Iterator[str]:
    """Name what keeps the engine from a kernel that exports states, with the way to get one."""
    from vllm.model_executor.layers.mamba.ops.kda_prefill.select import BACKENDS, unsupported

    capability = current_platform.get_device_capability()
    if capability is None or capability.major not in KERNEL_CAPABILITIES:
        name = f"SM{capability.major}{capability.minor}" if capability is not None else "no CUDA GPU"
        yield f"no kernel exports states on this device ({name}): use SM90, SM10x or SM12x"
        capability = None
    backend = backend_choice(vllm_config)
    if backend not in BACKENDS:
        yield f"there is no KDA prefill backend {backend!r}: set {BACKEND} to one of {', '.join(BACKENDS)}"
        return
    if backend == "triton":
        yield f"the KDA prefill backend is triton, which exports no states: {WITHOUT_BACKEND}"
        return
    if capability is None or vllm_config.model_config.architecture not in MODELS:
        return
    text = vllm_config.model_config.hf_text_config
    layer = {
        "capability": (capability.major, capability.minor),
        "head_dim": text.linear_head_dim,
        "lower_bound": text.linear_lower_bound,
    }
    reason = unsupported(backend, **layer)
    if reason:
        hint = WITHOUT_BACKEND if not unsupported("auto", **layer) else f"serve it with {GATE}=0"
        yield f"the KDA prefill backend {backend} exports no states here ({reason}): {hint}"


def check(vllm_config: VllmConfig) -> None:
    """Refuse a configuration that cannot coalesce, and give one that can its scheduler and worker.

    Raises:
        ValueError: Conditions are unmet; one line names each, and how to meet it.
    """
    model = vllm_config.model_config
    if model is None or (model.runner_type == "draft" and vllm_config.scheduler_config.scheduler_cls == SCHEDULER):
        return  # A drafter's configuration is a copy of one that was accepted.
    unmet = list(unmet_conditions(vllm_config))
    if unmet:
        raise ValueError(f"{GATE}=1, but this engine cannot coalesce KDA prefill: " + "; ".join(unmet))
    vllm_config.scheduler_config.scheduler_cls = SCHEDULER
    vllm_config.parallel_config.worker_cls = WORKER
    _warn_unless_qualified(vllm_config)
    warn_unless_spans_are_whole(vllm_config)


def _warn_unless_qualified(vllm_config: VllmConfig) -> None:
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    draft_tokens = speculative.num_speculative_tokens if speculative is not None else 0
    setting = (
        f"TP{parallel.tensor_parallel_size}, DCP{parallel.decode_context_parallel_size}, {draft_tokens} draft tokens, "
        f"a budget of {vllm_config.scheduler_config.max_num_batched_tokens} tokens"
    )
    qualified = (
        parallel.tensor_parallel_size == 4
        and parallel.decode_context_parallel_size == 1
        and draft_tokens in (0, 3)
        and vllm_config.scheduler_config.max_num_batched_tokens == 8192
    )
    if not qualified:
        logger.warning_once(
            "KDA prefill coalescing is meant for TP4 with DCP1, no or 3 draft tokens and a budget of 8192 "
            "tokens; this engine has %s",
            setting,
        )
