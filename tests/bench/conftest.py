# SPDX-License-Identifier: Apache-2.0
"""A server to measure without a network, and samples of a run."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from tests.bench.fake_server import FakeEngine, make_app
from vllm_kda_prefill.bench.client import Client


@pytest.fixture
def serve() -> Callable[..., Client]:
    """Makes a client of a fake server; its engine is `client.engine`."""

    def make(**settings: object) -> Client:
        engine = FakeEngine(**settings)  # type: ignore[arg-type]
        client = Client("http://fake", transport=httpx.ASGITransport(app=make_app(engine)))
        client.engine = engine  # type: ignore[attr-defined]
        return client

    return make
