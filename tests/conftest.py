# SPDX-License-Identifier: Apache-2.0
"""Gives vLLM a platform that needs no device, and skips the tests that need a GPU where there is none."""

import contextlib

import pytest

# Before any test module: vLLM's modules read the platform while they are imported. A GPU host may have this
# checkout and no vLLM; the kernel tests run there.
with contextlib.suppress(ImportError):
    import vllm_kda_prefill.planning_platform  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch  # Only for GPU tests: it takes seconds.

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device; torch.cuda reports none")
        for item in gpu_tests:
            item.add_marker(skip)
