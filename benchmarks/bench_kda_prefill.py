# SPDX-License-Identifier: Apache-2.0
"""Time KDA prefill providers side by side and print a table with the settings that made it.

    python benchmarks/bench_kda_prefill.py --heads 8 16 64 --tokens 8192 --rows 1

Milliseconds between two events around one call; inputs and workspaces exist beforehand. Before every call 1 GiB is
cleared, which empties the L2 cache and gives the host time to queue the call: what is timed is the device. The arms
take turns: every round runs each of them once, each round starting with another, so that a change of clocks meets all
alike. A cell holds the median over the rounds and half the distance between the quartiles. `flashkda x1` is one
FlashKDA launch with one checkpoint, nothing else; `segmented` gathers and scatters states too; `native` reads and
writes the pool. 4 and 0 are checkpoints a row.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vllm.model_executor.layers.mamba.ops.kda_prefill import Checkpoints, KDAPrefillInputs
from vllm.model_executor.layers.mamba.ops.kda_prefill.base import KDAPrefill


def make_inputs(heads: int, lens: list[int], checkpoints: int) -> tuple[KDAPrefillInputs, Checkpoints]:
    """Gaussian activations; every row starts from a state and exports its deepest `checkpoints` positions."""
    torch.manual_seed(0)
    rows, tokens = len(lens), sum(lens)

    def gauss(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(torch.bfloat16)

    # Positions 512, 1024, 2048, 4096 before the end, or the same ladder scaled down for short rows.
    offsets = []
    for length in lens:
        unit = max(16, min(512, length // 16 // 16 * 16))
        ladder = [length // 16 * 16 - unit * 2**k for k in range(4)]
        offsets.append(sorted(x for x in ladder if 0 < x < length)[-checkpoints:] if checkpoints else [])
    number = rows
    indices = []
    for row in offsets:
        indices.append([number + 1 + i for i in range(len(row))])
        number += len(row)
    shape = (1, tokens, heads, 128)
    inputs = KDAPrefillInputs(
        q=gauss(*shape),
        k=gauss(*shape),
        v=gauss(*shape),
        g=gauss(*shape),
        beta=gauss(1, tokens, heads),
        A_log=0.5 * torch.randn(heads, device="cuda"),
        dt_bias=0.5 * torch.randn(heads, 128, device="cuda"),
        scale=128**-0.5,
        lower_bound=-5.0,
        cu_seqlens=torch.tensor([0, *lens]).cumsum(0).to(torch.int32).cuda(),
        state_pool=0.3 * torch.randn(number + 1, heads, 128, 128, device="cuda"),
        state_indices=torch.arange(1, rows + 1, dtype=torch.int32, device="cuda"),
        has_initial_state=torch.ones(rows, dtype=torch.bool, device="cuda"),
        out=torch.empty(shape, dtype=torch.bfloat16, device="cuda"),
    )
    return inputs, Checkpoints.from_host(offsets, indices, lens, "cuda")


def runner(op: KDAPrefill, inputs: KDAPrefillInputs, checkpoints: Checkpoints | None) -> Callable[[], None]:
    workspace = tuple(torch.empty(s, dtype=d, device="cuda") for s, d in op.workspace_specs())
    return lambda: op.run(inputs, checkpoints, workspace)


def flashkda_once(inputs: KDAPrefillInputs, checkpoints: Checkpoints) -> Callable[[], None]:
    """One FlashKDA launch with the deepest checkpoint of every row."""
    from vllm.model_executor.layers.mamba.ops.kda_prefill.flashkda import FlashKDALauncher
    from vllm.model_executor.layers.mamba.ops.kda_prefill.segmented import Launch

    rows, tokens, heads = inputs.num_rows, inputs.q.shape[1], inputs.q.shape[2]
    launcher = FlashKDALauncher(num_heads=heads, max_num_tokens=tokens, max_num_seqs=rows)
    scratch = tuple(torch.empty(s, dtype=d, device="cuda") for s, d in launcher.workspace_specs())
    initial, final, checkpoint = inputs.state_pool[1 : rows + 1].repeat(3, 1, 1, 1).chunk(3)
    deepest = torch.tensor([max(row, default=0) for row in checkpoints.host_offsets], dtype=torch.int32).cuda()
    launch = Launch(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.g,
        inputs.beta,
        torch.empty_like(inputs.out),
        inputs.A_log,
        inputs.dt_bias,
        inputs.scale,
        inputs.lower_bound,
        inputs.cu_seqlens,
        initial,
        final,
        checkpoint,
        deepest,
    )
    return lambda: launcher(launch, scratch)


def providers(heads: int, tokens: int, rows: int, value_tiles: int | None) -> dict[str, KDAPrefill]:
    from vllm.model_executor.layers.mamba.ops.kda_prefill.flashkda import FlashKDALauncher
    from vllm.model_executor.layers.mamba.ops.kda_prefill.native import NativeKDAPrefill
    from vllm.model_executor.layers.mamba.ops.kda_prefill.segmented import SegmentedKDAPrefill

    sizes = {"num_heads": heads, "max_num_tokens": tokens, "max_num_seqs": rows}
    return {
        "segmented": SegmentedKDAPrefill(FlashKDALauncher(**sizes), **sizes),
        "native": NativeKDAPrefill(**sizes, value_tiles=value_tiles),
    }


def interleave(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every call, one entry a round; three rounds before them warm up."""
    cache = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(-3, rounds):
        events = {}
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            cache.zero_()
            begin.record()
            calls[name]()
            end.record()
            events[name] = begin, end
        torch.cuda.synchronize()
        if turn >= 0:
            for name, (begin, end) in events.items():
                times[name].append(begin.elapsed_time(end))
    return times


def measure(heads: int, lens: list[int], rounds: int, value_tiles: int | None = None) -> dict[str, list[float]]:
    """Milliseconds by arm and round for one batch shape."""
    inputs, four = make_inputs(heads, lens, 4)
    none = replace(
        four,
        checkpoint_offsets=torch.zeros_like(four.checkpoint_offsets),
        state_indices=torch.zeros_like(four.state_indices),
    )
    none = replace(none, host_offsets=[[] for _ in lens], host_state_indices=[[] for _ in lens])
    calls = {"flashkda x1": flashkda_once(inputs, four)}
    for name, op in providers(heads, sum(lens), len(lens), value_tiles).items():
        calls[f"{name} 4"] = runner(op, inputs, four)
        calls[f"{name} 0"] = runner(op, inputs, none)
    return interleave(calls, rounds)


def cell(times: list[float]) -> str:
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:.3f} +-{(high - low) / 2:.3f}"


def settings(rounds: int) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"commit {commit.stdout.strip() or 'unknown'}; medians of {rounds} rounds in which the arms take turns"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192], help="tokens of one row")
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--value-tiles", type=int, choices=(1, 2, 4), help="recurrence block width, 16 columns")
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    if os.environ.get("FLASHKDA_LIBRARY"):
        torch.ops.load_library(os.environ["FLASHKDA_LIBRARY"])
    print(settings(arguments.rounds))
    names: list[str] = []
    for heads in arguments.heads:
        for rows in arguments.rows:
            for tokens in arguments.tokens:
                times = measure(heads, [tokens] * rows, arguments.rounds, arguments.value_tiles)
                if not names:
                    names = list(times)
                    print("| heads | rows x tokens | " + " | ".join(names) + " |")
                    print("|---" * (len(names) + 2) + "|")
                cells = " | ".join(cell(times[name]) for name in names)
                print(f"| {heads} | {rows} x {tokens} | {cells} |", flush=True)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
