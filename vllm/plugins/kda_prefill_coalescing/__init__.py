# SPDX-License-Identifier: Apache-2.0
"""The gate. vLLM loads it in every process; everything else of this fork loads only if a setting asks for it."""

import os

GATE = "VLLM_B12X_KDA_PREFILL_COALESCING"
SPLIT_TARGET = "VLLM_GLM53_SPLIT_TARGET_BLOCK_SIZE"
SPLIT_MAMBA = "VLLM_GLM53_SPLIT_MAMBA_BLOCK_SIZE"


def is_on(value: str | None) -> bool:
    """Read a switch: unset, empty, `0`, `false`, `no`, `off`, or `1`, `true`, `yes`, `on`.

    Raises:
        ValueError: Any other value.
    """
    text = (value or "0").strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{GATE}={value!r} is neither on nor off; set it to 1 or 0")


def register() -> None:
    """Entry point of the `vllm.general_plugins` group; may run any number of times."""
    coalescing = is_on(os.environ.get(GATE))
    if coalescing or os.environ.get(SPLIT_TARGET) or os.environ.get(SPLIT_MAMBA):
        from vllm.plugins.kda_prefill_coalescing.patches import bind

        bind(coalescing)
