# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with the gate on, under concurrent clients: every answer against its uncached answer."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.arms import Arm, prompt
from tests.engine.compare import difference
from tests.engine.glm import write_config

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

CLIENTS = 8
REQUESTS = 200
ABORTED = 20
LISTED = 200
"""Logprobs a token, less than elsewhere: they all go through HTTP."""


class Server:
    """A served model and its log."""

    def __init__(self, folder: Path, num_blocks: int) -> None:
        model = write_config(folder / "glm")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.log = folder / "serve.log"
        port = self.url.rsplit(":", 1)[1]
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        command += ["--host", "127.0.0.1", "--port", port, "--served-model-name", "glm"]
        command += ["--skip-tokenizer-init", "--load-format", "seeded", "--language-model-only"]
        command += ["--max-model-len", "20000", "--max-num-batched-tokens", "8192", "--max-num-seqs", "32"]
        command += ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--max-logprobs", str(LISTED)]
        command += ["--gpu-memory-utilization", "0.1", "--num-gpu-blocks-override", str(num_blocks)]
        command += ["--kv-cache-memory-bytes", str(8 << 30), "--enforce-eager"]
        command += ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}']
        self.process = subprocess.Popen(
            command, env=Arm(True).environment(), stdout=self.log.open("w"), stderr=subprocess.STDOUT
        )

    def wait(self, seconds: float = 240) -> None:
        """Wait until the server answers.

        Raises:
            RuntimeError: It ended, or did not answer in time.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health").status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                time.sleep(1)
        raise RuntimeError("the server did not start:\n" + "\n".join(self.log.read_text().splitlines()[-40:]))

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by name, labels left out and summed over."""
        values: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                values[name] = values.get(name, 0.0) + float(value)
        return values


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("serve"), num_blocks=260)
    try:
        server.wait()
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
        if "KDA_ENGINE_LOGS" in os.environ:
            shutil.copy(server.log, os.environ["KDA_ENGINE_LOGS"])


def workload(seed: int) -> list[list[int]]:
    """Prompts of up to 8,192 tokens that share, extend and branch off one another."""
    source = random.Random(seed)
    system = prompt(1536, 7)
    prompts: list[list[int]] = []
    for number in range(REQUESTS):
        kind = source.random()
        if prompts and kind < 0.6:
            base = source.choice(prompts)
            cut = source.randrange(1, len(base) + 1) if kind < 0.35 else len(base)
            tokens = base[:cut] + prompt(source.randrange(16, 2500), 10_000 + number)
        else:
            tokens = system + prompt(source.randrange(16, 5000), 20_000 + number)
        prompts.append(tokens[:8192])
    return prompts


async def ask(client: httpx.AsyncClient, tokens: list[int], salt: str | None, max_tokens: int) -> dict[str, Any]:
    """One completion; a salt of its own keeps it from hitting anything."""
    body: dict[str, Any] = {
        "model": "glm",
        "prompt": tokens,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "logprobs": LISTED,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
    }
    if salt is not None:
        body["cache_salt"] = salt
    response = await client.post("/v1/completions", json=body, timeout=300)
    response.raise_for_status()
    answer = response.json()
    choice = answer["choices"][0]["logprobs"]
    details = answer["usage"].get("prompt_tokens_details") or {}
    return {
        "tokens": choice["tokens"],
        "logprobs": choice["top_logprobs"],
        "cached": details.get("cached_tokens") or 0,
    }


def faults_at_the_end(log: str) -> int:
    """How many faults a server logged while it ended, besides one that is none.

    Stock cancels the task that receives its engine's outputs, which tells the task that hands them on that the engine
    is dead; if that runs once more before it is cancelled as well, it logs so.
    """
    told = ("in output_handler", "vllm.v1.engine.exceptions.EngineDeadError: ")
    tracebacks = log.split("Traceback (most recent call last):")[1:]
    return sum(not all(words in traceback for words in told) for traceback in tracebacks)


async def abort(client: httpx.AsyncClient, tokens: list[int], after: float) -> None:
    """Start a completion and hang up."""
    try:
        await asyncio.wait_for(ask(client, tokens, None, 64), after)
    except TimeoutError:
        return


async def drive(url: str, prompts: list[list[int]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Answers of all prompts from concurrent clients, then each one's uncached answer."""
    source = random.Random(5)
    queue = list(enumerate(prompts))
    answers: dict[int, Any] = {}

    async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=2 * CLIENTS)) as client:

        async def work() -> None:
            while queue:
                number, tokens = queue.pop(0)
                if number % (REQUESTS // ABORTED) == 0:
                    await abort(client, tokens[: len(tokens) // 2], source.uniform(0.01, 0.3))
                answers[number] = await ask(client, tokens, None, source.randrange(4, 24))

        await asyncio.gather(*(work() for _ in range(CLIENTS)))
        pairs = []
        for number, tokens in enumerate(prompts):
            uncached = await ask(client, tokens, f"salt-{number}", len(answers[number]["tokens"]))
            pairs.append((answers[number], uncached))
    return pairs


def test_two_hundred_requests_answer_as_uncached(server):
    pairs = asyncio.run(drive(server.url, workload(3)))
    assert len(pairs) == REQUESTS
    cached = [answer["cached"] for answer, _ in pairs]
    assert all(uncached["cached"] == 0 for _, uncached in pairs)
    assert sum(count > 0 for count in cached) > REQUESTS // 4
    differences = sorted(difference(answer, uncached) for answer, uncached in pairs)
    cold = sorted(difference(answer, uncached) for answer, uncached in pairs if answer["cached"] == 0)
    print(
        f"{sum(cached)} cached tokens; difference to uncached: median {differences[len(differences) // 2]:.4f}, "
        f"largest {differences[-1]:.4f}; among answers without a hit: largest {cold[-1]:.4f}"
    )
    # Batching alone moves logprobs of answers that hit nothing; a hit may not move them much further.
    assert differences[-1] <= max(2 * cold[-1], 0.3)
    metrics = server.metrics()
    assert metrics["vllm:num_preemptions_total"] > 0
    assert metrics["vllm:kda_prefill_spans_coalesced_total"] > REQUESTS
    assert metrics["vllm:kda_prefill_states_exported_total"] > REQUESTS
    print({name: value for name, value in metrics.items() if "kda_prefill" in name and not name.endswith("_created")})
    print(f"{metrics['vllm:num_preemptions_total']:.0f} preemptions")
    served = server.log.read_text()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=60) == 0, server.log.read_text()[-3000:]
    ending = server.log.read_text()[len(served) :]
    assert "KDA prefill coalescing: blocks of 512 tokens" in served
    assert served.count("KDA prefill plan: request") == 100
    assert "Traceback" not in "\n".join(
        line for line in served.splitlines() if "Chat template" not in line and "base.py" not in line
    )
    assert not faults_at_the_end(ending)
