# SPDX-License-Identifier: Apache-2.0
"""One torch thread: the model's matrices are too small to share."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)
