# SPDX-License-Identifier: Apache-2.0
"""One request at a time to an OpenAI-compatible server: exact prompts, streamed tokens, a monotonic clock."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from vllm_kda_prefill.bench.errors import BenchError
from vllm_kda_prefill.bench.metrics import Metrics

TIMEOUT = httpx.Timeout(300.0, connect=10.0)
RESETS = 10
DETAILS = "--enable-prompt-tokens-details"


@dataclass(frozen=True)
class Arrival:
    """Tokens of an answer that had arrived at a time.

    Attributes:
        seconds: Since the request was sent.
        tokens: Of the answer, all that had arrived by then.
    """

    seconds: float
    tokens: int


@dataclass(frozen=True)
class Answer:
    """What one request got.

    Attributes:
        prompt: Prompt tokens, as the server counted them.
        cached: Of these, tokens that the server found in its prefix cache.
        output: Tokens of the answer.
        ttft: Seconds from sending the request to the first streamed token.
        seconds: Seconds to the end of the stream.
        sent: When it was sent, by the client's monotonic clock.
        arrivals: One for each streamed piece of the answer.
    """

    prompt: int
    cached: int
    output: int
    ttft: float
    seconds: float
    sent: float
    arrivals: tuple[Arrival, ...] = field(repr=False, default=())


class Client:
    """A server's completions endpoint and metrics."""

    def __init__(self, url: str, model: str = "", transport: httpx.AsyncBaseTransport | None = None) -> None:
        """Nothing is sent before the first request.

        Args:
            url: Root of the server, without /v1.
            model: Name it is served under; empty for whatever the server names first.
            transport: Where requests go instead of the network.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        limits = httpx.Limits(max_connections=64)
        self._http = httpx.AsyncClient(base_url=self.url, timeout=TIMEOUT, transport=transport, limits=limits)

    async def close(self) -> None:
        await self._http.aclose()

    async def find_model(self) -> str:
        """The served model's name, asked for once.

        Raises:
            BenchError: Nobody answers, or no model is served.
        """
        if not self.model:
            models = (await self._get("/v1/models")).json().get("data") or []
            if not models:
                raise BenchError(f"{self.url} serves no model; start it with one")
            self.model = models[0]["id"]
        return self.model

    async def version(self) -> str:
        """The server's version, empty where it does not say."""
        try:
            return str((await self._get("/version")).json().get("version", ""))
        except BenchError:
            return ""

    async def metrics(self) -> Metrics:
        """The server's counters.

        Raises:
            BenchError: Nobody answers, or there are no metrics.
        """
        return Metrics.parse((await self._get("/metrics")).text)

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; a server that is still letting go of its last request gets a moment for it.

        Raises:
            BenchError: The server does not offer that.
        """
        for _ in range(RESETS):
            response = await self._send("POST", "/reset_prefix_cache")
            if response.status_code != httpx.codes.OK:
                raise BenchError(
                    f"{self.url}/reset_prefix_cache answered {response.status_code}; "
                    "start the server with VLLM_SERVER_DEV_MODE=1"
                )
            if response.json().get("success"):
                return
            await asyncio.sleep(0.2)
        raise BenchError(f"{self.url} did not empty its prefix cache; send it nothing else while it is measured")

    async def complete(self, tokens: list[int], max_tokens: int = 1) -> Answer:
        """Send a prompt of token ids and stream the answer, greedy, of exactly `max_tokens` tokens.

        Raises:
            BenchError: Nobody answers, the server refuses, or its usage does not say what is cached.
        """
        body = {
            "model": await self.find_model(),
            "prompt": tokens,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        content = json.dumps(body).encode()
        request = self._http.build_request(
            "POST", "/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        arrivals: list[Arrival] = []
        usage: dict[str, Any] = {}
        sent = time.perf_counter()
        async for now, event in self._events(request):
            usage = event.get("usage") or usage
            if event.get("choices"):
                known = (event.get("usage") or {}).get("completion_tokens")
                count = known if known is not None else len(arrivals) + 1
                arrivals.append(Arrival(now - sent, count))
        return self._answer(tokens, max_tokens, usage, arrivals, sent, time.perf_counter() - sent)

    def _answer(
        self,
        tokens: list[int],
        max_tokens: int,
        usage: dict[str, Any],
        arrivals: list[Arrival],
        sent: float,
        seconds: float,
    ) -> Answer:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is None:
            raise BenchError(f"usage of {self.url} has no prompt_tokens_details; start the server with {DETAILS}")
        prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if prompt != len(tokens):
            raise BenchError(
                f"{self.url} counted {prompt} prompt tokens of {len(tokens)} sent; send to /v1/completions of a "
                "server that takes token ids as they are"
            )
        if output != max_tokens or not arrivals:
            raise BenchError(f"{self.url} answered {output} tokens of {max_tokens}; it must honour ignore_eos")
        return Answer(prompt, cached, output, arrivals[0].seconds, seconds, sent, tuple(arrivals))

    async def _events(self, request: httpx.Request) -> AsyncIterator[tuple[float, dict[str, Any]]]:
        """Each server-sent event with the time its line was complete."""
        try:
            response = await self._http.send(request, stream=True)
            try:
                if response.status_code != httpx.codes.OK:
                    text = " ".join((await response.aread()).decode(errors="replace").split())
                    raise BenchError(f"{request.url} answered {response.status_code}: {text[:300]}")
                async for line in response.aiter_lines():
                    now = time.perf_counter()
                    if line.startswith("data: ") and line != "data: [DONE]":
                        event = json.loads(line[6:])
                        if "error" in event:
                            raise BenchError(f"{request.url} streamed an error: {str(event['error'])[:300]}")
                        yield now, event
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    async def _get(self, path: str) -> httpx.Response:
        response = await self._send("GET", path)
        if response.status_code != httpx.codes.OK:
            raise BenchError(f"{self.url}{path} answered {response.status_code}; is this a vLLM server?")
        return response

    async def _send(self, method: str, path: str) -> httpx.Response:
        try:
            return await self._http.request(method, path)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: Exception) -> BenchError:
        reason = str(error) or type(error).__name__
        return BenchError(f"{self.url} cannot be reached ({reason}); start the server, or name its root URL")
