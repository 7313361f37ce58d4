# SPDX-License-Identifier: Apache-2.0
"""A hybrid model's layers as its KV cache sees them: their cache specs and attention backends, and no weights.

GLM-5.3-Flash has vLLM's own layer classes, made without weights. Any other hybrid model has one stub for each
attention and each recurrent layer, with the sizes that vLLM's alignment of blocks computes from its configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

# The platform first: see there.
from vllm_kda_prefill.planning_platform import PlanningPlatform  # isort: skip

import torch
from torch import nn

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms.interface import DeviceCapability
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec, get_kv_quant_mode
from vllm_kda_prefill.planning import _StubModel, prepare

GLM = ("Glm5NextForCausalLM", "Glm5NextForConditionalGeneration")
STATE_METHODS = (
    "get_mamba_state_dtype_from_config",
    "get_mamba_state_shape_from_config",
    "get_mamba_specs_from_config",
)
RECURRENT_BLOCK_TYPES: tuple[Literal["mamba", "linear_attention"], ...] = ("mamba", "linear_attention")
ATTENTION_NAMES = ("attention", "full_attention", "hybrid")
RECURRENT_NAMES = ("mamba", "linear_attention", "conv", "hybrid")
SPARSE_MLA_BACKENDS = {
    9: AttentionBackendEnum.FLASHINFER_MLA_SPARSE_SM90,
    10: AttentionBackendEnum.FLASHINFER_MLA_SPARSE,
    12: AttentionBackendEnum.FLASHINFER_MLA_SPARSE_SM120,
}
"""The sparse MLA backend that vLLM tries first for GLM-5.3-Flash, by major compute capability."""


@cache
def register(architecture: str) -> None:
    """Put a stub class in the registry: vLLM's own state sizes, and nothing that would need a processor.

    Raises:
        ValueError: vLLM knows no such architecture.
    """
    prepare()
    # Stubs of the planner may have taken these names.
    if architecture in GLM:
        import vllm.models.glm5next as glm5next

        model: Any = getattr(glm5next, architecture)
    elif architecture in ModelRegistry.models:
        model = ModelRegistry.models[architecture].load_model_cls()
    else:
        raise ValueError(f"vLLM knows no architecture {architecture}")
    if not getattr(model, "is_hybrid", False):
        raise ValueError(f"{architecture} is no hybrid model: it has no recurrent layers beside attention")
    methods = {name: getattr(model, name) for name in STATE_METHODS if hasattr(model, name)}
    ModelRegistry.register_model(architecture, type(architecture, (_StubModel,), methods))


def add_layers(vllm_config: VllmConfig, capability: int) -> None:
    """Give a configuration the layers of its model.

    Args:
        vllm_config: Of a registered stub.
        capability: Major compute capability of the GPU it is for.

    Raises:
        ValueError: The model's configuration does not say how many layers of each kind it has.
    """
    with set_current_vllm_config(vllm_config):
        is_glm = vllm_config.model_config.architecture in GLM
        layers = _glm_layers(vllm_config, capability) if is_glm else _generic_layers(vllm_config)
        # The caches of an indexer put themselves there; the rest has to be put.
        vllm_config.compilation_config.static_forward_context |= dict(layers)


@contextmanager
def as_gpu(capability: int, minor: int = 0) -> Iterator[None]:
    """Let kernels that ask the platform for its compute capability see this one."""
    before = PlanningPlatform.__dict__.get("get_device_capability")
    answer = classmethod(lambda cls, device_id=0: DeviceCapability(capability, minor))
    PlanningPlatform.get_device_capability = answer  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        if before is None:
            del PlanningPlatform.get_device_capability
        else:
            PlanningPlatform.get_device_capability = before  # type: ignore[method-assign]


def _glm_layers(vllm_config: VllmConfig, capability: int) -> Iterator[tuple[str, AttentionLayerBase]]:
    text = vllm_config.model_config.hf_text_config
    drafts = text.num_nextn_predict_layers if vllm_config.speculative_config is not None else 0
    kinds = [*text.layer_types, *["indexed_attention"] * drafts]
    for index, kind in enumerate(kinds):
        prefix = f"model.layers.{index}.self_attn"
        if kind == "linear_attention":
            yield prefix, _kda_layer(vllm_config)
            continue
        for name, layer in _indexed_layers(vllm_config, capability, prefix):
            layer.is_draft_layer = index >= text.num_hidden_layers
            yield name, layer


def _kda_layer(vllm_config: VllmConfig) -> AttentionLayerBase:
    from vllm.models.glm5next.common.kda import Glm5NextLinearAttention

    text = vllm_config.model_config.hf_text_config
    return _without_weights(
        Glm5NextLinearAttention,
        model_config=vllm_config.model_config,
        cache_config=vllm_config.cache_config,
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        num_heads=text.linear_num_heads,
        head_dim=text.linear_head_dim,
        conv_size=text.linear_conv_kernel_dim,
        num_spec=vllm_config.num_speculative_tokens,
        kda_prefill_backend="flashkda",
    )


def _indexed_layers(vllm_config: VllmConfig, capability: int, prefix: str) -> Iterator[tuple[str, AttentionLayerBase]]:
    """A sparse MLA layer and its indexer's two caches, in the order of the model's own layers."""
    from vllm.model_executor.layers.attention.mla_attention import (
        MLAAttention,
        _canonicalize_sparse_mla_kv_cache_dtype,
    )
    from vllm.models.glm5next.common.attention import Glm5NextIndexerCache, Glm5NextTailCache
    from vllm.models.glm5next.common.model import get_sparse_topk_buffer_width

    text, cache_config = vllm_config.model_config.hf_text_config, vllm_config.cache_config
    if text.index_topk is not None:
        # A row of the index ends in a scale of four bytes for every 128 values.
        caches: tuple[tuple[str, Any, int, torch.dtype], ...] = (
            ("k_cache", Glm5NextIndexerCache, text.index_head_dim + text.index_head_dim // 128 * 4, torch.uint8),
            ("tail_cache", Glm5NextTailCache, text.index_head_dim, torch.bfloat16),
        )
        for name, cls, head_dim, dtype in caches:
            name = f"{prefix}.indexer.{name}"
            yield (
                name,
                cls(
                    head_dim=head_dim,
                    dtype=dtype,
                    prefix=name,
                    cache_config=cache_config,
                    index_kpool=text.index_kpool,
                ),
            )
    backend = _sparse_mla_backend(cache_config.cache_dtype, capability)
    # A layer settles the format of its rows with its backend, and with it their bytes: 656 for each fp8 one on SM12x.
    row_format: Any = _canonicalize_sparse_mla_kv_cache_dtype(backend, cache_config.cache_dtype)
    cache_config.cache_dtype = row_format
    yield (
        f"{prefix}.mla_attn",
        _without_weights(
            MLAAttention,
            head_size=text.kv_lora_rank + text.qk_rope_head_dim,
            kv_cache_dtype=row_format,
            sliding_window=None,
            topk_buffer_width=get_sparse_topk_buffer_width(text) if text.index_topk is not None else None,
            indexer=object() if text.index_topk is not None else None,
            non_causal_multi_token_decode=False,
            attn_backend=backend,
        ),
    )


def _sparse_mla_backend(cache_dtype: str, capability: int) -> type[AttentionBackend]:
    if cache_dtype.endswith("_ds_mla") and capability != 12:
        return AttentionBackendEnum.FLASHMLA_SPARSE.get_class()
    return SPARSE_MLA_BACKENDS[capability].get_class()


def _without_weights(cls: type, **attributes: Any) -> Any:
    layer: Any = object.__new__(cls)
    nn.Module.__init__(layer)
    vars(layer).update(attributes)
    return layer


def _generic_layers(vllm_config: VllmConfig) -> Iterator[tuple[str, AttentionLayerBase]]:
    attention, recurrent = _layer_counts(vllm_config)
    for index in range(attention):
        yield f"attention.{index}", _Attention(vllm_config.model_config.use_mla)
    for index in range(recurrent):
        yield f"recurrent.{index}", _Recurrent(vllm_config)


def _layer_counts(vllm_config: VllmConfig) -> tuple[int, int]:
    """Attention and recurrent layers: as vLLM counts them, or by the names in the model's configuration.

    Raises:
        ValueError: Neither says.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    attention = model.get_num_layers_by_block_type(parallel, "attention")
    recurrent = sum(model.get_num_layers_by_block_type(parallel, kind) for kind in RECURRENT_BLOCK_TYPES)
    text = model.hf_text_config
    names = getattr(text, "layers_block_type", None) or getattr(text, "layer_types", None) or []
    attention = attention or sum(name in ATTENTION_NAMES for name in names)
    recurrent = recurrent or sum(name in RECURRENT_NAMES for name in names)
    if not attention or not recurrent:
        raise ValueError(
            f"its configuration names {attention} attention and {recurrent} recurrent layers: a hybrid model has both"
        )
    return attention, recurrent


class _Attention(AttentionLayerBase):
    """A full-attention layer of the sizes in the model's configuration."""

    def __init__(self, mla: bool) -> None:
        self.mla = mla

    def get_attn_backend(self) -> type[AttentionBackend]:
        return (AttentionBackendEnum.FLASH_ATTN_MLA if self.mla else AttentionBackendEnum.FLASH_ATTN).get_class()

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        model, cache_config = vllm_config.model_config, vllm_config.cache_config
        name = cache_config.cache_dtype
        spec: dict[str, Any] = {
            "block_size": cache_config.block_size,
            "num_kv_heads": model.get_num_kv_heads(vllm_config.parallel_config),
            "head_size": model.get_head_size(),
            "dtype": model.dtype if name == "auto" else STR_DTYPE_TO_TORCH_DTYPE[name],
            "kv_quant_mode": get_kv_quant_mode(name),
        }
        return MLAAttentionSpec(**spec, cache_dtype_str=name) if self.mla else FullAttentionSpec(**spec)


class _Recurrent(MambaBase):
    """A recurrent layer of the state sizes that the model class computes."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        model: Any = ModelRegistry.resolve_model_cls(
            vllm_config.model_config.architecture, model_config=vllm_config.model_config
        )[0]
        if hasattr(model, "get_mamba_specs_from_config"):
            largest = max(model.get_mamba_specs_from_config(vllm_config), key=lambda spec: spec.page_size_bytes)
            self.shapes, self.dtypes = largest.shapes, largest.dtypes
        else:
            self.shapes = model.get_mamba_state_shape_from_config(vllm_config)
            self.dtypes = model.get_mamba_state_dtype_from_config(vllm_config)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.LINEAR

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self.dtypes
