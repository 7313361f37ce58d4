# SPDX-License-Identifier: Apache-2.0
"""The KV cache of a hybrid model in stock's layout and in split layouts, from its config.json."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_kda_prefill.layer_stubs import GLM, add_layers, as_gpu, register  # isort: skip  (the platform first)

from vllm.config import CacheConfig, SchedulerConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.plugins.kda_prefill_coalescing import index_rows
from vllm.plugins.kda_prefill_coalescing.block_layout import kernel_unit, refuse
from vllm.v1.core.block_sizes import BlockSettings, BlockSizes, candidates
from vllm.v1.core.cache_capacity import CacheGroup, CacheLayout, block_sizes, measure
from vllm.v1.core.state_retention import Retention
from vllm_kda_prefill.model_config import GLM_NAME, architecture, make_configs, reading

LENGTHS = (8192, 32768, 131072)
"""Request lengths, and prompt lengths of a ladder, that a report is about."""


@dataclass(frozen=True)
class EngineShape:
    """What decides an engine's KV cache, besides memory.

    Attributes:
        model: Folder of a config.json; None for GLM-5.3-Flash's shapes.
        tp: Tensor parallel ranks.
        dcp: Decode context parallel ranks.
        mtp: Draft tokens of multi-token prediction, 0 for none.
        kv_cache_dtype: vLLM's `--kv-cache-dtype`.
        max_model_len: vLLM's `--max-model-len`, None for the model's own.
        capability: Major compute capability of the GPU.
    """

    model: Path | None = None
    tp: int = 1
    dcp: int = 1
    mtp: int = 0
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    capability: int = 9

    @property
    def architecture(self) -> str:
        """The model's first architecture.

        Raises:
            ValueError: Its config.json names none.
        """
        return architecture(self.model)

    @property
    def name(self) -> str:
        """What a report calls the model."""
        return GLM_NAME if self.model is None else self.model.resolve().name

    def vllm_config(self) -> VllmConfig:
        """A configuration with the model's layers, its block sizes not aligned yet.

        Raises:
            ValueError: vLLM cannot serve this model or these sizes; the message is its own.
        """
        config = self.config_before_layers()
        add_layers(config, self.capability)
        return config

    def config_before_layers(self, interleave: int = 1) -> VllmConfig:
        """A configuration as a server checks it, before its model is made.

        Args:
            interleave: vLLM's `--cp-kv-cache-interleave-size`.

        Raises:
            ValueError: As for `vllm_config`.
        """
        register(self.architecture)
        if self.mtp and self.architecture not in GLM:
            raise ValueError(f"draft layers of {self.architecture} are not known here: give --mtp 0")
        model, parallel, speculative = make_configs(
            self.model,
            tp=self.tp,
            dcp=self.dcp,
            mtp=self.mtp,
            max_model_len=self.max_model_len,
            interleave=interleave,
        )
        cache_dtype: Any = self.kv_cache_dtype
        with reading(self.model):
            return VllmConfig(
                model_config=model,
                cache_config=CacheConfig(
                    enable_prefix_caching=True, cache_dtype=cache_dtype, prefix_cache_retention_interval=0
                ),
                scheduler_config=SchedulerConfig(
                    max_num_batched_tokens=8192,
                    max_num_seqs=64,
                    max_model_len=model.max_model_len,
                    is_encoder_decoder=False,
                    enable_chunked_prefill=True,
                ),
                parallel_config=parallel,
                speculative_config=speculative,
            )


@dataclass(frozen=True)
class CacheReport:
    """Stock's layout and split ones at the same memory.

    Attributes:
        shape: The engine.
        memory: Bytes of KV cache on one rank.
        max_model_len: Tokens of the longest request, which vLLM's own figure of cache tokens is for.
        layouts: Name -> layout; `stock` first.
        auto: Name of the layout that `auto` chooses.
    """

    shape: EngineShape
    memory: int
    max_model_len: int
    layouts: dict[str, CacheLayout]
    auto: str

    def as_json(self) -> dict[str, Any]:
        engine = asdict(self.shape) | {"model": str(self.shape.model or GLM_NAME), "max_model_len": self.max_model_len}
        layouts = {name: self._layout_as_json(layout) for name, layout in self.layouts.items()}
        return {"engine": engine, "memory": self.memory, "auto": self.auto, "layouts": layouts}

    def _layout_as_json(self, layout: CacheLayout) -> dict[str, Any]:
        return {
            "attention_block": layout.sizes.attention,
            "mamba_block": layout.sizes.mamba,
            "lookup": layout.grid.hit_alignment,
            "scheduler_block": layout.grid.scheduler_block,
            "block_bytes": layout.block_bytes,
            "blocks": layout.blocks(self.memory),
            "groups": [self._group_as_json(layout, group) for group in layout.groups],
            "bytes_per_token": layout.bytes_per_token,
            "tokens_of_cache": self.tokens_of_cache(layout),
            "requests": {length: layout.requests(self.memory, length) for length in LENGTHS},
            "state_bytes": layout.state_bytes,
            "state_content_bytes": layout.state_content_bytes,
            "ladders": {
                length: {"positions": ladder(layout, length), "bytes": len(ladder(layout, length)) * layout.state_bytes}
                for length in LENGTHS
            },
        }

    def _group_as_json(self, layout: CacheLayout, group: CacheGroup) -> dict[str, Any]:
        return {
            "kind": group.kind,
            "layers": group.layers,
            "tokens": group.tokens,
            "content_bytes": group.content_bytes,
            "wasted_bytes": layout.waste(group),
        }

    def tokens_of_cache(self, layout: CacheLayout) -> int:
        """What vLLM would log as the size of the cache."""
        return layout.tokens_of_cache(self.memory, self.max_model_len)


def ladder(layout: CacheLayout, prompt: int) -> list[int]:
    """States that policy `ladder` retains of a prompt."""
    return list(Retention(layout.grid).checkpoint_positions(prompt))


def make_report(shape: EngineShape, memory: int, sizes: BlockSizes | None = None) -> CacheReport:
    """Measure stock's layout, the split of 512-token blocks or the given one, and what `auto` would choose.

    Raises:
        ValueError: vLLM cannot serve this model or these sizes, or no split keeps 8K spans coalesced.
    """
    with as_gpu(shape.capability):
        config = shape.vllm_config()
        # The settings that split a layout also bind what lets the index have its rows.
        with index_rows.bound():
            split, pairs, shown = _measure_splits(config, sizes)
        longest = config.model_config.max_model_len
        # As `auto` does: of equals the finest.
        best = max(pairs, key=lambda pair: split[pair].tokens_of_cache(2**40, longest))
        current_platform.update_block_size_for_backend(config)
        stock = measure(config, LENGTHS)
    layouts = {"stock": stock} | {str(pair): split[pair] for pair in (shown, best)}
    return CacheReport(shape, memory, longest, layouts, str(best))


def _measure_splits(
    config: VllmConfig, sizes: BlockSizes | None
) -> tuple[dict[BlockSizes, CacheLayout], list[BlockSizes], BlockSizes]:
    """Every split to show or to choose from, those that `auto` chooses from, and the one to show first."""
    unit = kernel_unit(config, current_platform._find_non_ssm_backends(config))
    if sizes is not None:
        refuse(BlockSettings(*sizes).problems(unit, ("--target", "--mamba")))
    refuse(BlockSettings("auto", "auto").problems(unit))
    pairs = candidates(unit)
    shown = sizes or (BlockSizes(512, 512) if BlockSizes(512, 512) in pairs else pairs[0])
    return {pair: _measure_split(config, pair) for pair in dict.fromkeys([*pairs, shown])}, pairs, shown


def _measure_split(config: VllmConfig, sizes: BlockSizes) -> CacheLayout:
    with block_sizes(config, sizes):
        return measure(config, LENGTHS, block_outermost=True)
