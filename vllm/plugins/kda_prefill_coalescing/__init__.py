# SPDX-License-Identifier: Apache-2.0
"""The gate. vLLM loads it in every process. Before a setting asks for more, only it and the variables' names load."""

import os

from vllm.kda_prefill_variables import GATE, SPLIT_MAMBA, SPLIT_TARGET


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
