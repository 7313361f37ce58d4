# SPDX-License-Identifier: Apache-2.0
"""`kda-prefill bench prefill`, `branches`, `decode`, `conversations`: measure a server that is there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_kda_prefill.bench.options import (
    DEFAULT_SIZES,
    Branching,
    Model,
    Name,
    Output,
    SampleCount,
    Seconds,
    Seed,
    Sizes,
    Turns,
    Url,
    check_url,
    finish,
    make_settings,
    numbers,
)
from vllm_kda_prefill.paths import check_output

if TYPE_CHECKING:
    from vllm_kda_prefill.bench.settings import RunSettings


def measure_url(url: str, model: str, settings: RunSettings, output: Path, seconds: float, name: str) -> None:
    check_url(url)
    check_output(output)
    from vllm_kda_prefill.bench.runner import measure_url as measure

    finish(measure(url, model, settings, output, seconds, name), output)


def prefill(
    url: Url,
    sizes: Sizes = DEFAULT_SIZES,
    samples: SampleCount = 10,
    seconds: Seconds = 600,
    seed: Seed = 1,
    model: Model = "",
    name: Name = "server",
    output: Output = Path("bench/prefill.jsonl"),
) -> None:
    """Cold prompts to a server that is there: warm-ups, probes, then samples with zero cached tokens each."""
    settings = make_settings(suites=("cold",), sizes=numbers(sizes, "--sizes"), samples=samples, seed=seed)
    measure_url(url, model, settings, output, seconds, name)


def branches(
    url: Url,
    points: Annotated[str, typer.Option(help="Where to leave the 8,192-token prompt, with commas.")] = (
        "7900,7400,6500,5000"
    ),
    samples: SampleCount = 20,
    seconds: Seconds = 300,
    seed: Seed = 1,
    model: Model = "",
    name: Name = "server",
    output: Output = Path("bench/branches.jsonl"),
) -> None:
    """Follow-ups that leave a cached 8,192-token prompt, to a server that is there."""
    settings = make_settings(
        suites=("branches",), sizes=(8192,), points=numbers(points, "--points"), samples=samples, seed=seed
    )
    measure_url(url, model, settings, output, seconds, name)


def decode(
    url: Url,
    contexts: Annotated[str, typer.Option(help="Prompt tokens, with commas.")] = "8192,32768",
    output_tokens: Annotated[int, typer.Option(help="Tokens a request decodes.", min=2)] = 256,
    samples: SampleCount = 6,
    seconds: Seconds = 300,
    seed: Seed = 1,
    model: Model = "",
    name: Name = "server",
    output: Output = Path("bench/decode.jsonl"),
) -> None:
    """Tokens and steps a second of one and of four requests at a time, to a server that is there."""
    settings = make_settings(
        suites=("decode",),
        sizes=(8192,),
        contexts=numbers(contexts, "--contexts"),
        output_tokens=output_tokens,
        samples=samples,
        seed=seed,
    )
    measure_url(url, model, settings, output, seconds, name)


def conversations(
    url: Url,
    turns: Turns = 120,
    branching: Branching = 0.5,
    traces: Annotated[int, typer.Option(help="Most traces.", min=1)] = 3,
    seconds: Seconds = 600,
    seed: Seed = 1,
    model: Model = "",
    name: Name = "server",
    output: Output = Path("bench/conversations.jsonl"),
) -> None:
    """Conversations that extend and branch, to a server that is there (started with VLLM_SERVER_DEV_MODE=1)."""
    from vllm_kda_prefill.bench.workloads import Conversations

    workload = Conversations(turns=turns, branching=branching, seed=seed)
    settings = make_settings(suites=("conversations",), sizes=(8192,), workload=workload, traces=traces, seed=seed)
    measure_url(url, model, settings, output, seconds, name)
