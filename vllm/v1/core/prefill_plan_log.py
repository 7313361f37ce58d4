# SPDX-License-Identifier: Apache-2.0
"""A log of the first plans of a process."""

from __future__ import annotations

import vllm.envs as envs
from vllm.logger import init_logger

logger = init_logger(__name__)


class PlanLog:
    """Logs as many lines as `VLLM_B12X_KDA_PREFILL_COALESCING_LOG_LIMIT` says, and drops the rest."""

    def __init__(self) -> None:
        self._left: int = envs.VLLM_B12X_KDA_PREFILL_COALESCING_LOG_LIMIT

    @property
    def wants(self) -> bool:
        """Whether the next line will be logged."""
        return self._left > 0

    def line(self, message: str, *values: object) -> None:
        """Log a message with `%` placeholders and their values."""
        if self.wants:
            self._left -= 1
            logger.info(message, *values)
