"""Cold time to first token of the real engine, gate on against stock, with both engines taking turns on one GPU.

Usage: python -m benchmarks.bench_cold_prefill [--samples 12] [--json OUT]. Random weights, GLM-5.3-Flash layer
shapes (8 layers, 32 experts), 512-token pages, MTP3, CUDA graphs. A sample is the wall time of one request for one
token, in the engine's own process, with a prompt nobody has sent before.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tests.engine.arms import Arm, ArmProcess, prompt
from tests.engine.glm import write_config

SIZES = (8192, 16384, 32768)


def measure(samples: int, eager: bool, backend: str) -> dict[str, dict[int, list[float]]]:
    """Seconds of each sample, by arm and prompt length."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(Path(folder, "glm"))
        arms = {
            "stock": ArmProcess(Arm(False, eager=eager), model, Path(folder)),
            "coalesced": ArmProcess(Arm(True, eager=eager, backend=backend), model, Path(folder)),
        }
        seconds: dict[str, dict[int, list[float]]] = {name: {size: [] for size in SIZES} for name in arms}
        seed = 0
        for sample in range(-3, samples):
            for size in SIZES:
                for name, arm in arms.items():
                    seed += 1
                    (answer,) = arm.step({"generate": [prompt(size, seed)], "max_tokens": 1})
                    assert answer["cached"] == 0
                    if sample >= 0:
                        seconds[name][size].append(answer["seconds"])
        for arm in arms.values():
            arm.close()
    return seconds


def main(
    samples: Annotated[int, typer.Option(help="Samples a size and arm, after three warm-ups.")] = 12,
    eager: Annotated[bool, typer.Option(help="Without CUDA graphs.")] = False,
    backend: Annotated[str, typer.Option(help="KDA prefill backend of the coalesced arm.")] = "auto",
    output: Annotated[Path | None, typer.Option("--json", help="Write every sample here.")] = None,
) -> None:
    seconds = measure(samples, eager, backend)
    table = Table("tokens", "stock ms", "coalesced ms", "ratio", title=f"cold TTFT, median of {samples}, {backend}")
    for size in SIZES:
        stock, ours = (statistics.median(seconds[name][size]) for name in ("stock", "coalesced"))
        table.add_row(f"{size:,}", f"{stock * 1e3:.1f}", f"{ours * 1e3:.1f}", f"{ours / stock:.3f}")
    Console().print(table)
    if output is not None:
        output.write_text(json.dumps({"samples": seconds, "eager": eager, "backend": backend}, indent=1))


if __name__ == "__main__":
    typer.run(main)
