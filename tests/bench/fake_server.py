# SPDX-License-Identifier: Apache-2.0
"""A stub of `vllm serve`: the endpoints that measurements use, over a prefix cache of prompts' states.

Usage: fake_server.py MODEL --host HOST --port PORT [...]. Reads the gate's environment as the plugin does. `FAULT`
in the environment plants what a measurement must not believe.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from vllm_kda_prefill.bench.arms import GATE

BLOCK = 512


def ladder(length: int) -> list[int]:
    """The checkpoint positions of a prompt, on blocks of 512 tokens."""
    end = (length - 1) // BLOCK * BLOCK + BLOCK
    found, distance = [], BLOCK
    while distance < end:
        found.append(end - distance)
        distance *= 2
    return [position for position in found if position < length]


@dataclass
class FakeEngine:
    """Prompts it has seen, and what a server would count."""

    coalesces: bool = False
    keeps_ladder: bool = False
    fault: str = ""
    step: float = 0.002
    prefill: float = 0.0
    states: set[int] = field(default_factory=set)
    counters: dict[str, float] = field(default_factory=dict)

    def count(self, name: str, by: float) -> None:
        self.counters[name] = self.counters.get(name, 0) + by

    def admit(self, tokens: list[int]) -> int:
        """Cached tokens of a prompt, whose states are kept."""
        positions = ladder(len(tokens)) if self.keeps_ladder else ladder(len(tokens))[:1]
        hits = [p for p in range(BLOCK, len(tokens), BLOCK) if hash(tuple(tokens[:p])) in self.states]
        self.states |= {hash(tuple(tokens[:position])) for position in positions}
        self.count("vllm:prefix_cache_queries_total", len(tokens))
        self.count("vllm:prefix_cache_hits_total", max(hits, default=0))
        if self.coalesces and self.fault != "idle gate":
            self.count("vllm:kda_prefill_spans_coalesced_total", 1)
            self.count("vllm:kda_prefill_states_exported_total", len(positions))
            print("INFO KDA prefill plan: request a, query [0, 1), checkpoints (), blocks {}", flush=True)
        return 512 if self.fault == "warm" else max(hits, default=0)

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        tokens, output = body["prompt"], body["max_tokens"]
        cached = self.admit(tokens)
        await asyncio.sleep(self.prefill * (len(tokens) - cached))
        sent = 0
        while sent < output:
            by = min(2, output - sent) if sent else 1
            if sent:
                self.count("vllm:spec_decode_num_drafts_total", 1)
                self.count("vllm:spec_decode_num_accepted_tokens_total", by - 1)
            sent += by
            usage = {"prompt_tokens": len(tokens), "completion_tokens": sent}
            yield _event({"choices": [{"text": ""}], "usage": usage})
            await asyncio.sleep(self.step)
        details: dict[str, Any] = (
            {} if self.fault == "no details" else {"prompt_tokens_details": {"cached_tokens": cached}}
        )
        last = {"prompt_tokens": len(tokens), "completion_tokens": output, **details}
        yield _event({"choices": [], "usage": last})
        yield "data: [DONE]\n\n"

    def metrics(self) -> str:
        """Prometheus' text of the counters."""
        lines = [f'{name}{{engine="0",model_name="fake"}} {value}' for name, value in self.counters.items()]
        return "\n".join(["# HELP x y", "# TYPE x counter", *lines, ""])


def _event(event: dict[str, Any]) -> str:
    return f"data: {json.dumps(event)}\n\n"


def make_app(engine: FakeEngine) -> Starlette:
    """The endpoints of a server."""

    async def health(_: Request) -> Response:
        return Response()

    async def models(_: Request) -> Response:
        return JSONResponse({"data": [{"id": "fake"}]})

    async def version(_: Request) -> Response:
        return JSONResponse({"version": "fake"})

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(engine.metrics())

    async def reset(_: Request) -> Response:
        engine.states.clear()
        return JSONResponse({"success": engine.fault != "busy"})

    async def completions(request: Request) -> Response:
        if engine.fault == "refuses":
            return JSONResponse({"error": "the prompt is too long"}, status_code=400)
        body = await request.json()
        if engine.fault == "ends when it decodes" and engine.coalesces and body["max_tokens"] > 1:
            os._exit(3)
        return StreamingResponse(engine.stream(body), media_type="text/event-stream")

    routes = [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/version", version),
        Route("/metrics", metrics),
        Route("/reset_prefix_cache", reset, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
    ]
    return Starlette(routes=routes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--scheduler-cls")
    known, _ = parser.parse_known_args()
    fault = os.environ.get("FAULT", "")
    if fault == "does not start":
        raise RuntimeError("the model does not fit")
    coalesces = os.environ.get(GATE) == "1" or fault == "gate always on"
    if coalesces:
        print("INFO KDA prefill coalescing: blocks of 512 tokens", flush=True)
    keeps_ladder = coalesces or (known.scheduler_cls is not None and fault != "unequal")
    engine = FakeEngine(coalesces=coalesces, keeps_ladder=keeps_ladder, fault=fault)
    uvicorn.run(make_app(engine), host=known.host, port=known.port, log_level="warning")


if __name__ == "__main__":
    main()
