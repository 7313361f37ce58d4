# SPDX-License-Identifier: Apache-2.0
"""Start an arm as a process and read its answers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import one_gpu
from tests.engine.compare import LISTED
from tests.engine.glm import write_config
from vllm.kda_prefill_variables import GATE, LOG_LIMIT, RETENTION, SPLIT_MAMBA, SPLIT_TARGET

RUN_ARM = Path(__file__).with_name("run_arm.py")
SPLIT = (SPLIT_TARGET, SPLIT_MAMBA)


@dataclass(frozen=True)
class Arm:
    """How one engine is started; `split` is the attention and the recurrent block, None for stock's own, and `capture`
    are the batches in tokens that CUDA graphs are captured for, none for vLLM's own choice.

    With `tp` above 1 the ranks share the one GPU (`one_gpu.py`); `dcp` of them share a sequence's attention cache, in
    what Hopper asks for then."""

    gate: bool
    eager: bool = True
    capture: tuple[int, ...] = ()
    mtp: int = 3
    policy: str = "ladder"
    backend: str = "auto"
    num_blocks: int | None = None
    split: tuple[str, str] | None = ("512", "512")
    cache_gib: int = 2
    budget: int = 8192
    tp: int = 1
    dcp: int = 1
    log_limit: int = 100
    label: str = ""

    def __post_init__(self) -> None:
        if self.tp > 1 and not self.eager:
            raise ValueError("ranks that share a GPU run eager only: leave eager as it is")

    @property
    def name(self) -> str:
        return (
            f"{'on' if self.gate else 'off'}-{'eager' if self.eager else 'graphs'}-mtp{self.mtp}-{self.policy}"
            f"-{self.backend}-{'x'.join(self.split or ('stock',))}"
            f"{f'-{self.num_blocks}blocks' if self.num_blocks else ''}"
            f"{f'-captured{max(self.capture)}' if self.capture else ''}"
            f"{f'-tp{self.tp}dcp{self.dcp}' if self.tp > 1 else ''}"
            f"{self.label and '-' + self.label}"
        )

    @property
    def peak_gib(self) -> int:
        """GPU memory that the engine comes to, weights and their making included, with layers as wide as GLM's."""
        return self.tp * ((16 if self.tp > 1 else 18) + self.cache_gib)

    def engine_arguments(self, model: Path) -> dict[str, Any]:
        """What `vllm.LLM` takes."""
        arguments: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "load_format": "seeded",
            "language_model_only": True,
            "max_model_len": 40000,
            "max_num_batched_tokens": self.budget,
            "max_num_seqs": 32,
            "enable_prefix_caching": True,
            # Several arms share the GPU, so none measures what is free.
            "gpu_memory_utilization": 0.1,
            "kv_cache_memory_bytes": self.cache_gib << 30,
            "enforce_eager": self.eager,
            "max_logprobs": LISTED,
        }
        if self.mtp:
            arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": self.mtp}
        if self.num_blocks:
            arguments["num_gpu_blocks_override"] = self.num_blocks
        if self.capture:
            arguments["compilation_config"] = {"cudagraph_capture_sizes": list(self.capture)}
        if self.tp > 1:
            arguments |= {"tensor_parallel_size": self.tp, "distributed_executor_backend": "mp"}
        if self.dcp > 1:
            arguments |= {
                "decode_context_parallel_size": self.dcp,
                "kv_cache_dtype": "fp8_ds_mla",
                "cp_kv_cache_interleave_size": 16,
            }
        if self.backend != "auto":
            arguments["additional_config"] = {"kda_prefill_backend": self.backend}
        return arguments

    def environment(self) -> dict[str, str]:
        """This process's environment with the arm's settings."""
        split = dict(zip(SPLIT, self.split, strict=True)) if self.split else {}
        return {
            **{name: value for name, value in os.environ.items() if name not in SPLIT},
            GATE: str(int(self.gate)),
            RETENTION: self.policy,
            LOG_LIMIT: str(self.log_limit),
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            **split,
            **(one_gpu.environment(self.tp) if self.tp > 1 else {}),
        }


class ArmProcess:
    """A running arm that takes a step at a time."""

    def __init__(self, arm: Arm, model: Path, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = arm.name
        self._log = folder / f"{arm.name}.log"
        engine = folder / f"{arm.name}.json"
        engine.write_text(json.dumps(arm.engine_arguments(model)))
        read, write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, str(RUN_ARM), str(engine), str(write)],
            env=arm.environment(),
            stdin=subprocess.PIPE,
            stdout=self._log.open("w"),
            stderr=subprocess.STDOUT,
            pass_fds=(write,),
            text=True,
        )
        os.close(write)
        self._answers = os.fdopen(read)

    def step(self, step: dict[str, Any]) -> Any:
        """Run one step and return its answer.

        Raises:
            RuntimeError: The arm ended; the message holds its log's last lines.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(step) + "\n")
            self._process.stdin.flush()
            answer = self._answers.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            code = self._process.wait(timeout=60)
            tail = "\n".join(self._log.read_text().splitlines()[-40:])
            raise RuntimeError(f"arm {self.name} exited with {code}:\n{tail}")
        return json.loads(answer)

    def close(self) -> None:
        """Let the arm end, if it has not."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()


def run(arm: Arm, model: Path, steps: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Run all steps on an arm of its own; its log and its answers stay in `folder`."""
    process = ArmProcess(arm, model, folder)
    try:
        answers = [process.step(step) for step in steps]
    finally:
        process.close()
    (folder / f"{arm.name}.answers.json").write_text(json.dumps(answers))
    return answers


def _engines_that_fit(gib: int) -> int:
    """How many engines that peak at so many GiB the GPU's free memory holds."""
    free, _ = torch.cuda.mem_get_info()
    return max(1, free // (gib << 30))


class Runs:
    """Every arm's answers, a few engines at a time on the one GPU; an arm that failed fails the tests that ask for it.

    `KDA_ENGINE_ARMS` (names, comma separated) runs some of the arms only; tests of the others are skipped. Logs and
    answers are kept in the folder `KDA_ENGINE_LOGS` if it is set. `config` goes to `write_config`.
    """

    def __init__(
        self, arms: dict[str, tuple[Arm, list[dict[str, Any]]]], folder: Path, at_once: int = 5, **config: int
    ) -> None:
        self.folder = Path(os.environ.get("KDA_ENGINE_LOGS", folder))
        self.arms = {name: arm for name, (arm, _) in arms.items()}
        self.model = write_config(folder / "glm", **config)
        at_once = min(at_once, _engines_that_fit(max(arm.peak_gib for arm in self.arms.values())))
        chosen = os.environ.get("KDA_ENGINE_ARMS")
        names = [name.strip() for name in chosen.split(",")] if chosen else list(arms)
        with ThreadPoolExecutor(at_once) as pool:
            self._futures = {
                name: pool.submit(run, *(arms[name][0], self.model, arms[name][1], self.folder))
                for name in names
                if name in arms
            }

    def answers(self, name: str) -> list[Any]:
        """One answer a step; of a step with one prompt, that prompt's.

        Raises:
            RuntimeError: The arm ended early.
        """
        if name not in self._futures:
            pytest.skip(f"KDA_ENGINE_ARMS leaves {name!r} out")
        return [answer[0] if isinstance(answer, list) else answer for answer in self._futures[name].result()]

    def log(self, name: str) -> str:
        """The arm's log."""
        return (self.folder / f"{self.arms[name].name}.log").read_text()


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids, the same for the same seed."""
    source = random.Random(seed)
    return [source.randrange(10, 31900) for _ in range(length)]


def generate(tokens: list[int], max_tokens: int, logprobs: int) -> dict[str, Any]:
    """A step that sends one prompt."""
    return {"generate": [tokens], "max_tokens": max_tokens, "logprobs": logprobs}
