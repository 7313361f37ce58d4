# SPDX-License-Identifier: Apache-2.0
"""The engine that the flags describe: what vLLM and the gate say of it, and the block sizes that it will get."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kda_prefill.doctor.findings import Finding, from_server, green, red, yellow
from vllm_kda_prefill.doctor.hardware import Capability
from vllm_kda_prefill.refusals import plain

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.cache_capacity import CacheLayout

PROMPT = 8192
"""Tokens of the prompt whose states a line names."""


@dataclass(frozen=True)
class Flags:
    """What a server is given, as far as it matters here; names are those of vLLM's options.

    Attributes:
        model: A folder with a config.json, or the name of a model that was downloaded; None for GLM-5.3-Flash's shapes.
        tp: Tensor parallel ranks.
        dcp: Decode context parallel ranks.
        mtp: Draft tokens of multi-token prediction, 0 for none.
        kv_cache_dtype: The cache's dtype.
        interleave: `--cp-kv-cache-interleave-size`.
        max_model_len: Tokens of the longest request; None for the model's own.
        utilization: `--gpu-memory-utilization`.
        backend: `kda_prefill_backend` in `--additional-config`.
        attention_backend: `--attention-backend`; None where it is left out.
        block_size: `--block-size`; None where it is left out.
    """

    model: str | None = None
    tp: int = 1
    dcp: int = 1
    mtp: int = 0
    kv_cache_dtype: str = "auto"
    interleave: int = 1
    max_model_len: int | None = None
    utilization: float = 0.92
    backend: str = "auto"
    attention_backend: str | None = None
    block_size: int | None = None


def model_folder(name: str | None) -> Path | None:
    """The folder of a model: itself, or where Hugging Face's cache has it; `name` where neither is there."""
    if name is None or Path(name).is_dir():
        return Path(name) if name else None
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:
        found = None
    return Path(found).parent if isinstance(found, str) else Path(name)


def model_findings(name: str | None, problem: str) -> list[Finding]:
    """What is wrong with the model's config.json.

    Args:
        name: What `--model` gives.
        problem: What `model_config.model_problem` says; an empty string where the model can be looked at.
    """
    if problem:
        return [red("model", problem, "give a GLM-5.3-Flash folder with its config.json, or download the model first")]
    if name is None:
        return [yellow("model", "no --model, so the shapes are those of GLM-5.3-Flash", "give --model with its folder")]
    return [green("model", name)]


def weight_bytes(folder: Path | None, ranks: int) -> int | None:
    """Bytes of a model's safetensors over the ranks; None where there are none."""
    files = sorted(folder.glob("*.safetensors")) if folder is not None else []
    return sum(file.stat().st_size for file in files) // ranks if files else None


@contextmanager
def on_gpu(capability: Capability | None) -> Iterator[None]:
    """Let vLLM's code see a GPU of this compute capability, or none."""
    from vllm_kda_prefill.layer_stubs import as_gpu

    with as_gpu(*capability) if capability is not None else nullcontext():
        yield


def make_config(flags: Flags, folder: Path | None) -> VllmConfig:
    """The configuration that the gate checks at start.

    Raises:
        ValueError: vLLM or the flags rule it out.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm_kda_prefill.layout.report import EngineShape

    shape = EngineShape(folder, flags.tp, flags.dcp, flags.mtp, flags.kv_cache_dtype, flags.max_model_len)
    config = shape.config_before_layers(flags.interleave)
    if flags.attention_backend is not None:
        config.attention_config.backend = AttentionBackendEnum[flags.attention_backend]
    if flags.block_size is not None:
        cache: Any = config.cache_config
        cache.block_size, cache.user_specified_block_size = flags.block_size, True
    config.additional_config = {"kda_prefill_backend": flags.backend}
    return config


def refusal_finding(error: Exception) -> Finding:
    """What vLLM raised instead of a configuration."""
    return red("configuration", f"vLLM refuses the flags: {plain(error)}", "change the flag that the line names")


def configuration_findings(unmet: Sequence[str], engine: str) -> list[Finding]:
    """Every condition that a server with the gate on would name at start.

    Args:
        unmet: Its lines.
        engine: The engine in words.
    """
    lines = [from_server("configuration", line) for line in unmet]
    return lines or [green("configuration", f"{engine}: the gate's check at start lets it through")]


def measure_layout(flags: Flags, folder: Path | None, capability: Capability | None) -> CacheLayout:
    """The cache with the block sizes that a worker will settle on.

    Args:
        flags: The engine's.
        folder: Of its model.
        capability: Of its GPU; None for one as in `kda-prefill layout` without `--capability`.

    Raises:
        ValueError: No block sizes work.
    """
    from vllm.platforms import current_platform
    from vllm.plugins.kda_prefill_coalescing import block_layout, index_rows
    from vllm.v1.core.cache_capacity import block_sizes, measure
    from vllm_kda_prefill.layout.report import EngineShape

    major, minor = capability or (9, 0)
    with on_gpu((major, minor)):
        shape = EngineShape(folder, flags.tp, flags.dcp, flags.mtp, flags.kv_cache_dtype, flags.max_model_len, major)
        config = shape.vllm_config()
        settings = block_layout.read_settings()
        with index_rows.bound():
            if settings is None:
                current_platform.update_block_size_for_backend(config)
                return measure(config, (PROMPT,))
            unit = block_layout.kernel_unit(config, current_platform._find_non_ssm_backends(config))
            with block_sizes(config, block_layout.resolve(settings, config, unit)):
                return measure(config, (PROMPT,), block_outermost=True)


def block_findings(layout: CacheLayout) -> list[Finding]:
    """The block sizes, where lookups resume, and the states that a prompt of 8,192 tokens keeps.

    Of blocks that are too coarse the gate's check has said so.
    """
    from vllm.v1.core.block_sizes import SPAN_TOKENS, fills_span, forms_8k_path
    from vllm.v1.core.state_retention import Retention

    if not forms_8k_path(layout.sizes.mamba):
        return []
    kept = " ".join(f"{position:,}" for position in Retention(layout.grid).checkpoint_positions(PROMPT))
    message = (
        f"attention blocks of {layout.sizes.attention:,} tokens, Mamba blocks of {layout.sizes.mamba:,}, lookup "
        f"{layout.grid.hit_alignment:,}, scheduler {layout.grid.scheduler_block:,}; {PROMPT:,} tokens keep {kept}"
    )
    if not fills_span(layout.sizes.mamba):
        return [yellow("blocks", message, f"take Mamba blocks that divide {SPAN_TOKENS:,} tokens, as 512")]
    return [green("blocks", message)]
