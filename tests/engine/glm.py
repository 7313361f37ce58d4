# SPDX-License-Identifier: Apache-2.0
"""A small GLM-5.3-Flash: the real layer shapes, few layers and experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_config(folder: Path, layers: int = 8, experts: int = 32, heads: int = 64, topk: int = 2048) -> Path:
    """Write a config.json that vLLM serves with `--language-model-only`; the wrapper is what MTP needs.

    `heads` are those of attention, while the linear layers have 64; `topk` is how many tokens the indexer selects."""
    text: dict[str, Any] = {
        "model_type": "glm5_next_text",
        "dtype": "bfloat16",
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "indexed_attention"]
        * (layers // 4),
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * (layers - 3),
        "indexer_types": ["full"] * layers,
        "n_routed_experts": experts,
        "num_experts_per_tok": min(8, experts),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "index_topk": topk,
        "vocab_size": 32000,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "mhc": False,  # its kernels need TileLang
        "mla_use_nope": True,
        "indexer_rope_interleave": True,
        "num_nextn_predict_layers": 1,
    }
    special = ("image", "video", "image_start", "image_end", "video_start", "video_end")
    config = {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "dtype": "bfloat16",
        "text_config": text,
        "vision_config": {
            "model_type": "glm5_next_vision",
            "depth": 1,
            "hidden_size": 1024,
            "out_hidden_size": 4096,
        },
        "tie_word_embeddings": False,
        **{f"{name}_token_id": 31990 + i for i, name in enumerate(special)},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def mergeable(ranks: int) -> dict[str, int]:
    """What `write_config` takes for a model that stock runs with DCP on so many ranks of a Hopper GPU.

    Stock merges the ranks' selections if they are of 512 rows of 16 tokens, and asks for fewer than 32 attention heads
    a rank (docs/operations.md)."""
    return {"heads": 16 * ranks, "topk": 8192}
