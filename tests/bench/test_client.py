# SPDX-License-Identifier: Apache-2.0
"""The client believes nothing that the server does not say."""

from __future__ import annotations

import asyncio

import pytest

from vllm_kda_prefill.bench import metrics
from vllm_kda_prefill.bench.client import Client
from vllm_kda_prefill.bench.errors import BenchError
from vllm_kda_prefill.bench.metrics import Metrics
from vllm_kda_prefill.bench.servers import Server
from vllm_kda_prefill.bench.workloads import branch, prompt


def test_an_answer_counts_prompt_cached_and_output_tokens(serve):
    async def run():
        client = serve()
        tokens = prompt(2048, 1)
        return [await client.complete(tokens, 7), await client.complete(tokens, 1)]

    cold, warm = asyncio.run(run())
    assert (cold.prompt, cold.cached, cold.output) == (2048, 0, 7)
    assert (warm.prompt, warm.cached, warm.output) == (2048, 1536, 1)
    assert [arrival.tokens for arrival in cold.arrivals] == [1, 3, 5, 7]
    assert 0 < cold.ttft <= cold.arrivals[-1].seconds <= cold.seconds


def test_time_to_first_token_is_the_prefills_and_not_the_answers():
    """Over a real socket: what streams is seen as it comes."""

    async def run():
        import uvicorn

        from tests.bench.fake_server import FakeEngine, make_app

        app = make_app(FakeEngine(prefill=1e-4, step=0.02))
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        client = Client(f"http://127.0.0.1:{port}")
        answer = await client.complete(prompt(1000, 1), 11)
        await client.close()
        server.should_exit = True
        await task
        return answer

    answer = asyncio.run(run())
    assert 0.1 <= answer.ttft < 0.2 <= answer.seconds


def test_the_model_name_is_found_and_v1_in_the_url_is_dropped(serve):
    assert Client("http://host:1/v1/").url == "http://host:1"
    assert asyncio.run(serve().find_model()) == "fake"


def test_a_server_that_is_not_there_is_one_clear_line():
    with pytest.raises(BenchError, match=r"^http://127.0.0.1:9 cannot be reached .*; start the server"):
        asyncio.run(Client("http://127.0.0.1:9").find_model())


def test_usage_without_cached_tokens_is_refused(serve):
    with pytest.raises(BenchError, match="--enable-prompt-tokens-details"):
        asyncio.run(serve(fault="no details").complete(prompt(600, 1)))


def test_a_refusal_names_the_servers_reason(serve):
    with pytest.raises(BenchError, match=r"answered 400: .*the prompt is too long"):
        asyncio.run(serve(fault="refuses").complete(prompt(600, 1)))


def test_a_cold_prompt_that_hits_something_fails(serve):
    with pytest.raises(
        BenchError, match="cold prompt of 600 tokens found 512 in the prefix cache; give another --seed"
    ):
        asyncio.run(Server("stock", serve(fault="warm")).cold(prompt(600, 1)))


def test_a_cache_that_is_not_emptied_fails(serve, monkeypatch):
    monkeypatch.setattr("vllm_kda_prefill.bench.client.RESETS", 2)
    with pytest.raises(BenchError, match="did not empty its prefix cache"):
        asyncio.run(serve(fault="busy").reset_prefix_cache())
    asyncio.run(serve().reset_prefix_cache())


def test_branches_hit_the_state_below_where_they_leave(serve):
    async def run(**settings):
        client = serve(**settings)
        base = prompt(8192, 1)
        await client.complete(base)
        return [(await client.complete(branch(base, at, 1))).cached for at in (7900, 7400, 6500, 5000)]

    assert asyncio.run(run()) == [7680, 0, 0, 0]
    assert asyncio.run(run(keeps_ladder=True)) == [7680, 7168, 6144, 4096]


def test_metrics_sum_over_labels_and_count_from_nothing():
    before = Metrics.parse('# HELP a b\nvllm:prefix_cache_hits_total{engine="0"} 2.0\n')
    after = Metrics.parse(
        'vllm:prefix_cache_hits_total{engine="0"} 5.0\nvllm:prefix_cache_hits_total{engine="1"} 1.0\n'
        'vllm:kda_prefill_fallbacks_total{engine="0",reason="no_room"} 3.0 1700000000\n'
        'vllm:e2e_request_latency_seconds_bucket{le="+Inf"} 4\n'
    )
    assert after.since(before) == {metrics.HITS: 4.0, metrics.FALLBACKS: 3.0}
    assert after[metrics.SPANS] == 0
    assert after.coalesces
    assert not before.coalesces
