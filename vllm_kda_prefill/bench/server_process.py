# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` of its own process group: start, health, log, end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import httpx

from vllm_kda_prefill.bench.arms import Arm
from vllm_kda_prefill.bench.errors import BenchError

SERVE = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
SERVED_NAME = "measured"
OURS = ("--host", "--port", "--served-model-name", "--scheduler-cls", "--prefix-cache-retention-interval")
"""Arguments that the runner, or an arm's scheduler, sets."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ServerProcess:
    """One arm, started and not necessarily up yet."""

    def __init__(
        self,
        arm: Arm,
        model: str,
        arguments: list[str],
        logs: Path,
        serve: tuple[str, ...] = SERVE,
        processors: Collection[int] = (),
    ) -> None:
        """Start it, on some processors only if any are given.

        Raises:
            BenchError: An argument is the runner's own, or the log cannot be written.
        """
        for argument in arguments:
            if argument.partition("=")[0] in OURS:
                raise BenchError(f"{argument} is set by the runner for each arm; leave it out")
        port = free_port()
        self.arm = arm
        self.url = f"http://127.0.0.1:{port}"
        self.log = logs / f"{arm.name.replace('@', '-').replace('#', '-')}.log"
        self.command = [*serve, model, "--host", "127.0.0.1", "--port", str(port)]
        self.command += [
            "--served-model-name",
            SERVED_NAME,
            "--enable-prefix-caching",
            "--enable-prompt-tokens-details",
        ]
        self.command += [*arguments, *arm.arguments]
        try:
            logs.mkdir(parents=True, exist_ok=True)
            output = self.log.open("w")
        except OSError as error:
            raise BenchError(f"--logs {logs}: {error.strerror}; name a folder you can write to") from None
        try:
            self._process = subprocess.Popen(
                self.command,
                env={**os.environ, "VLLM_SERVER_DEV_MODE": "1", **arm.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise BenchError(
                f"--serve {serve[0]}: {error.strerror}; name a command that serves as vllm serve"
            ) from None
        finally:
            output.close()
        if processors:
            # It has started nothing yet: its threads and processes will all be where it is.
            os.sched_setaffinity(self._process.pid, processors)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def read_log(self) -> str:
        return self.log.read_text(errors="replace")

    async def wait(self, seconds: float) -> float:
        """Wait until it answers; returns how long that took.

        Raises:
            BenchError: It ended, or was not up in time; its log's last error is in the message.
        """
        start = time.monotonic()
        async with httpx.AsyncClient(base_url=self.url, timeout=5.0) as http:
            while self.is_running and time.monotonic() < start + seconds:
                try:
                    if (await http.get("/health")).status_code == httpx.codes.OK:
                        return time.monotonic() - start
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.5)
        what = f"was not up within {seconds:.0f} s" if self.is_running else f"ended with {self._process.returncode}"
        raise BenchError(f"arm {self.arm.name} {what}: {self._last_error()} (all of it: {self.log})")

    def _last_error(self) -> str:
        lines = [line.strip() for line in self.read_log().splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return " ".join((errors or lines or ["no output"])[-1].split())[-400:]

    def stop(self, seconds: float = 20) -> None:
        """End it and everything it started."""
        for stop, wait in ((signal.SIGTERM, seconds), (signal.SIGKILL, 5.0)):
            try:
                os.killpg(self._process.pid, stop)
            except ProcessLookupError:
                break
            try:
                self._process.wait(wait)
            except subprocess.TimeoutExpired:
                continue
        self._process.poll()
