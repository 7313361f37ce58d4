# SPDX-License-Identifier: Apache-2.0
"""The fork's environment variables, read through `vllm.envs` like vLLM's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import vllm.envs as envs
from vllm.kda_prefill_variables import GATE, LOG_LIMIT, RETENTION, SPLIT_MAMBA, SPLIT_TARGET
from vllm.plugins.kda_prefill_coalescing import is_on
from vllm.plugins.kda_prefill_coalescing.block_layout import read_settings, read_size
from vllm.v1.core.block_sizes import MOST_DIGITS
from vllm.v1.core.state_retention import POLICIES


def _coalescing() -> bool:
    return is_on(os.environ.get(GATE))


def _retention() -> str:
    value = os.environ.get(RETENTION) or POLICIES[0]
    if value not in POLICIES:
        raise ValueError(f"{RETENTION}={value!r} is no retention policy; set it to {' or '.join(POLICIES)}")
    return value


def _log_limit() -> int:
    value = os.environ.get(LOG_LIMIT) or "0"
    if not value.isascii() or not value.isdigit() or len(value) > MOST_DIGITS:
        raise ValueError(f"{LOG_LIMIT}={value!r} is not a number of plans to log; set it to 0 or more")
    return int(value)


SETTINGS: dict[str, Callable[[], Any]] = {
    GATE: _coalescing,
    RETENTION: _retention,
    LOG_LIMIT: _log_limit,
    SPLIT_TARGET: lambda: read_size(SPLIT_TARGET),
    SPLIT_MAMBA: lambda: read_size(SPLIT_MAMBA),
}


def register() -> None:
    """Make the settings readable as attributes of `vllm.envs`, and check their values.

    Raises:
        ValueError: A value that no setting takes; the message names it and what to set.
    """
    for name, read in SETTINGS.items():
        envs.environment_variables.setdefault(name, read)
        read()
    read_settings()
