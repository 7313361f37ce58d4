# SPDX-License-Identifier: Apache-2.0
"""The KV cache of a hybrid model in stock's layout and in split layouts, from its config.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_kda_prefill.layer_stubs import GLM, add_layers, as_gpu, register  # isort: skip  (the platform first)

from vllm.config import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.platforms import current_platform
from vllm.plugins.kda_prefill_coalescing.split_layout import kernel_unit
from vllm.v1.core.hybrid_cache_layout import CacheGroup, CacheLayout, measure, page_sizes
from vllm.v1.core.split_layout_planning import PageSizes, candidates
from vllm.v1.core.state_retention import Retention

LENGTHS = (8192, 32768, 131072)
"""Request lengths, and prompt lengths of a ladder, that a report is about."""


@dataclass(frozen=True)
class EngineShape:
    """What decides an engine's KV cache, besides memory.

    Attributes:
        model: Folder of a config.json.
        tp: Tensor parallel ranks.
        dcp: Decode context parallel ranks.
        mtp: Draft tokens of multi-token prediction, 0 for none.
        kv_cache_dtype: vLLM's `--kv-cache-dtype`.
        max_model_len: vLLM's `--max-model-len`, None for the model's own.
        capability: Major compute capability of the GPU.
    """

    model: Path
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
        names = json.loads((self.model / "config.json").read_text()).get("architectures")
        if not names:
            raise ValueError("its config.json names no architecture")
        return names[0]

    def vllm_config(self) -> VllmConfig:
        """A configuration with the model's layers, its page sizes not aligned yet.

        Raises:
            ValueError: vLLM cannot serve this model or these sizes; the message is its own.
        """
        register(self.architecture)
        if self.mtp and self.architecture not in GLM:
            raise ValueError(f"draft layers of {self.architecture} are not known here: give --mtp 0")
        length: Any = self.max_model_len
        model = ModelConfig(model=str(self.model), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=length)
        parallel = ParallelConfig(tensor_parallel_size=self.tp, decode_context_parallel_size=self.dcp)
        speculative = self.mtp and SpeculativeConfig(
            method="mtp",
            num_speculative_tokens=self.mtp,
            target_model_config=model,
            target_parallel_config=parallel,
        )
        cache_dtype: Any = self.kv_cache_dtype
        config = VllmConfig(
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
            speculative_config=speculative or None,
        )
        add_layers(config, self.capability)
        return config


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
        engine = asdict(self.shape) | {"model": str(self.shape.model), "max_model_len": self.max_model_len}
        layouts = {name: self._layout_as_json(layout) for name, layout in self.layouts.items()}
        return {"engine": engine, "memory": self.memory, "auto": self.auto, "layouts": layouts}

    def _layout_as_json(self, layout: CacheLayout) -> dict[str, Any]:
        return {
            "attention_page": layout.sizes.target,
            "recurrent_page": layout.sizes.mamba,
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


def make_report(shape: EngineShape, memory: int, sizes: PageSizes | None = None) -> CacheReport:
    """Measure stock's layout, the split of 512-token pages or the given one, and what `auto` would choose.

    Raises:
        ValueError: vLLM cannot serve this model or these sizes, or no split keeps 8K spans coalesced.
    """
    with as_gpu(shape.capability):
        config = shape.vllm_config()
        unit = kernel_unit(config, current_platform._find_non_ssm_backends(config))
        if sizes is not None and (sizes.target % unit or sizes.mamba % sizes.target):
            raise ValueError(
                f"pages of {sizes.target}/{sizes.mamba} tokens: this model's attention pages are multiples of {unit}, "
                "and its recurrent pages multiples of these"
            )
        pairs = candidates(unit)
        if not pairs:
            raise ValueError(f"attention pages are multiples of {unit} tokens, too coarse to split")
        shown = sizes or (PageSizes(512, 512) if PageSizes(512, 512) in pairs else pairs[0])
        split = {pair: _measure_split(config, pair) for pair in dict.fromkeys([*pairs, shown])}
        longest = config.model_config.max_model_len
        # As `auto` does: of equals the finest.
        best = max(pairs, key=lambda pair: split[pair].tokens_of_cache(2**40, longest))
        current_platform.update_block_size_for_backend(config)
        stock = measure(config, LENGTHS)
    layouts = {"stock": stock} | {f"{pair.target}/{pair.mamba}": split[pair] for pair in (shown, best)}
    return CacheReport(shape, memory, longest, layouts, f"{best.target}/{best.mamba}")


def _measure_split(config: VllmConfig, sizes: PageSizes) -> CacheLayout:
    with page_sizes(config, sizes):
        return measure(config, LENGTHS, block_outermost=True)
