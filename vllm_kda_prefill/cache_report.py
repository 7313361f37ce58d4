"""The KV cache of a hybrid model in stock's layout and in split layouts, from its config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kda_prefill.layer_stand_ins import add_layers, register  # isort: skip  (the platform first)

from vllm.config import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.platforms import current_platform


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

    def vllm_config(self) -> VllmConfig:
        """A configuration with the model's layers, its page sizes as stock leaves them.

        Raises:
            ValueError: vLLM cannot serve this model or these sizes; the message is its own.
        """
        (architecture,) = json.loads((self.model / "config.json").read_text())["architectures"]
        register(architecture)
        model = ModelConfig(
            model=str(self.model), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=self.max_model_len
        )
        parallel = ParallelConfig(tensor_parallel_size=self.tp, decode_context_parallel_size=self.dcp)
        config = VllmConfig(
            model_config=model,
            cache_config=CacheConfig(
                enable_prefix_caching=True, cache_dtype=self.kv_cache_dtype, prefix_cache_retention_interval=0
            ),
            scheduler_config=SchedulerConfig(
                max_num_batched_tokens=8192,
                max_num_seqs=64,
                max_model_len=model.max_model_len,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
            ),
            parallel_config=parallel,
            speculative_config=SpeculativeConfig(
                method="mtp",
                num_speculative_tokens=self.mtp,
                target_model_config=model,
                target_parallel_config=parallel,
            )
            if self.mtp
            else None,
        )
        add_layers(config, self.capability)
        return config
