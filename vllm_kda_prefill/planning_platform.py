# SPDX-License-Identifier: Apache-2.0
"""A vLLM platform for machines without a GPU. Importing this module installs it: do so before all of vLLM.

vLLM has no platform where it finds no accelerator, and its CPU platform cannot run prefix caching with MLA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import vllm.platforms
from vllm.platforms.interface import Platform, PlatformEnum

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class PlanningPlatform(Platform):
    """Says it is a GPU without one behind it: configurations can be built, nothing can be run."""

    _enum = PlatformEnum.OOT
    device_name = "planning"
    device_type = "cuda"
    dispatch_key = "CUDA"
    supported_quantization: list[str] = []  # noqa: RUF012  (the base class's own declaration)

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return True

    @classmethod
    def import_kernels(cls) -> None:
        """There are none to import."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Nothing depends on a device that is not there."""

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False


# vLLM's modules read the platform while they are imported.
vllm.platforms.current_platform = PlanningPlatform()
