# SPDX-License-Identifier: Apache-2.0
"""One torch thread: the model's matrices are too small to share."""

import logging

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def quiet_and_single_threaded():
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
