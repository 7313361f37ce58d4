"""Skips the tests that need a GPU where there is none."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch  # Only for GPU tests: it takes seconds.

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device; torch.cuda reports none")
        for item in gpu_tests:
            item.add_marker(skip)
