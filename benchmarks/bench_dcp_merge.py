# SPDX-License-Identifier: Apache-2.0
"""Time the merge of context-parallel ranks' selections and print a table with the settings that made it.

    python benchmarks/bench_dcp_merge.py --ranks 4 --out merge.md

Microseconds of one call on one GPU: the collective is left out, and its result made beforehand. Calls are captured in
a CUDA graph, many in a row, over as many inputs as do not fit the L2 cache together; a row is the median over the
replays of a replay's time divided by its calls. An empty kernel measured the same way is the launch.

- `select`: the kernel behind the all-gather. `pack + select`: with the one before it.
- `stock`: stock vLLM's selector, and with its own packing; at the sizes it takes, where vLLM and CuTeDSL are there.
- `torch.topk`: of the packed numbers, one int64 a candidate, and of the fp32 scores alone, which settles no ties.
- `floor`: the bytes that `select` reads and writes at the rate of a copy, measured here.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import kda_prefill_finder

kda_prefill_finder.install()  # Stock vLLM on PYTHONPATH would hide this checkout's modules.

from vllm.model_executor.layers.dcp_topk_merge import reference  # noqa: E402
from vllm.model_executor.layers.dcp_topk_merge._triton_kernels import launch_pack, launch_select  # noqa: E402

CACHE_BYTES = 256 << 20
COPY_BYTES = 1 << 30
REPLAY_MICROSECONDS = 20_000
"""One replay takes about as long, unless 64 calls are shorter."""

CONTEXT_ROWS = 2500
"""Rows of the whole context: 40,000 tokens in pools of 16."""


@triton.jit
def _empty_kernel(pointer):  # type: ignore[no-untyped-def]
    tl.store(pointer, 0, mask=False)


@dataclass
class Inputs:
    """One call's inputs on the device: a rank's scores and list, all ranks' packed candidates, and the output."""

    scores: torch.Tensor
    ids: torch.Tensor
    gathered: torch.Tensor
    out: torch.Tensor


def make_inputs(queries: int, ranks: int, k: int, copies: int) -> list[Inputs]:
    """Gaussian scores; every rank's list is its true selection, unsorted."""
    generator = torch.Generator("cuda").manual_seed(0)
    made = []
    for _ in range(copies):
        packed = []
        for rank in range(ranks):
            scores = torch.randn(queries, max(k, CONTEXT_ROWS // ranks), device="cuda", generator=generator)
            ids = scores.topk(k, sorted=False).indices.to(torch.int32)
            packed.append(reference.pack(scores, ids, rank, ranks, 1))
        made.append(Inputs(scores, ids, torch.stack(packed), torch.empty_like(ids)))
    return made


def microseconds(calls: Sequence[Callable[[], object]], replays: int) -> float:
    """Median time of one of `calls`, captured in turn in a CUDA graph and replayed."""
    for call in calls[:2]:
        call()
    once = timed(calls[0])
    captured = max(4, min(64, int(REPLAY_MICROSECONDS / once)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(captured):
            calls[i % len(calls)]()
    times = [timed(graph.replay) / captured for _ in range(replays + 3)]
    return statistics.median(times[3:])


def timed(call: Callable[[], object]) -> float:
    """Microseconds between two events around a call."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return 1000 * begin.elapsed_time(end)


def copy_rate(replays: int) -> float:
    """Bytes read and written a microsecond by a copy of `COPY_BYTES`."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / microseconds([lambda: target.copy_(source)], replays)


def stock_calls(inputs: list[Inputs], ranks: int, k: int) -> dict[str, list[Callable[[], object]]] | str:
    """Stock's selector and its packing before it over the same candidates, or why there are none.

    Stock's packed form is two fp32 a candidate, score and id.
    """
    try:
        from vllm.model_executor.kernels.attention.dsa import dcp_indexer_cutedsl as stock
    except Exception as error:
        # Whatever a host lacks for it, vLLM or CuTeDSL, the other rows are worth having.
        return f"not here ({error})"
    selects: list[Callable[[], object]] = []
    both: list[Callable[[], object]] = []
    for one in inputs:
        keys = one.gathered.movedim(0, 1).reshape(one.ids.shape[0], ranks * k)
        order = (keys >> 32).to(torch.int32)
        scores = torch.where(order < 0, order ^ 0x7FFFFFFF, order).view(torch.float32)
        gathered = torch.stack([scores, (~keys & 0xFFFFFFFF).float()], dim=-1).contiguous()
        packed = torch.empty((*one.ids.shape, 2), device=one.ids.device)

        def select(gathered: torch.Tensor = gathered, one: Inputs = one) -> None:
            stock.stable_topk_from_gathered_candidates_cutedsl(gathered, k, out=one.out)

        def pack_and_select(
            gathered: torch.Tensor = gathered, one: Inputs = one, packed: torch.Tensor = packed
        ) -> None:
            stock.pack_dcp_topk_candidates_cutedsl(one.scores, one.ids, packed, 0, ranks, 1, None)
            stock.stable_topk_from_gathered_candidates_cutedsl(gathered, k, out=one.out)

        selects.append(select)
        both.append(pack_and_select)
    try:
        both[0]()
        ours = torch.empty_like(inputs[0].out)
        launch_select(inputs[0].gathered, ours)
        if not torch.equal(ours.sort().values, inputs[0].out.sort().values):
            return "selects otherwise"
    except Exception as error:
        return f"does not run at {k} ({error})"
    return {"stock select": selects, "stock pack + select": both}


def our_calls(inputs: list[Inputs], ranks: int, k: int, keys: Sequence[int]) -> dict[str, list[Callable[[], object]]]:
    """Calls by column over inputs in turn."""
    packed = [torch.empty_like(one.gathered[0]) for one in inputs]

    def pack_and_select(one: Inputs, packed: torch.Tensor) -> None:
        launch_pack(one.scores, one.ids, packed, 0, ranks, 1)
        launch_select(one.gathered, one.out)

    calls: dict[str, list[Callable[[], object]]] = {
        "select": [partial(launch_select, one.gathered, one.out) for one in inputs],
        "pack + select": [partial(pack_and_select, *pair) for pair in zip(inputs, packed, strict=True)],
    }
    for number in keys:
        calls[f"select, {number} keys a thread"] = [
            partial(launch_select, one.gathered, one.out, number) for one in inputs
        ]
    flat = [one.gathered.movedim(0, 1).reshape(one.ids.shape[0], ranks * k).contiguous() for one in inputs]
    calls["torch.topk int64"] = [partial(torch.topk, numbers, k, sorted=False) for numbers in flat]
    calls["torch.topk fp32"] = [partial(torch.topk, (numbers >> 32).float(), k, sorted=False) for numbers in flat]
    return calls


def measure(queries: int, ranks: int, k: int, replays: int, rate: float, keys: Sequence[int]) -> dict[str, str]:
    """One row of the table."""
    size = queries * ranks * k * 8
    inputs = make_inputs(queries, ranks, k, max(2, min(16, CACHE_BYTES // size)))
    row: dict[str, float] = {"floor": (size + queries * k * 4) / rate}
    calls = our_calls(inputs, ranks, k, keys)
    stock = stock_calls(inputs, ranks, k)
    if not isinstance(stock, str):
        calls |= stock
    for name, call in calls.items():
        row[name] = microseconds(call, replays)
    cells = {"select / floor": f"{row['select'] / row['floor']:.2f}"}
    cells |= {name: f"{value:.1f}" for name, value in row.items()}
    if isinstance(stock, str):
        cells["stock select"] = cells["stock pack + select"] = " ".join(stock.split())[:80]
    return cells


def settings(replays: int, rate: float, launch: float, ranks: int) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, CUDA "
        f"{torch.version.cuda}, commit {commit.stdout.strip() or 'unknown'}; {ranks} ranks; microseconds, medians of "
        f"{replays} graph replays; a copy moves {rate / 1e6:.2f} TB/s; an empty kernel takes {launch:.1f} us"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--queries", type=int, nargs="+", default=[8192, 4])
    parser.add_argument("--k", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--keys", type=int, nargs="*", default=[], help="candidates a thread, to compare")
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--out", type=Path, help="a file that the table is written to as well")
    arguments = parser.parse_args()
    rate = copy_rate(arguments.replays)
    pointer = torch.empty(1, device="cuda")
    launch = microseconds([lambda: _empty_kernel[(1,)](pointer)], arguments.replays)
    lines = [settings(arguments.replays, rate, launch, arguments.ranks), ""]
    print(lines[0], flush=True)
    rows = []
    for queries in arguments.queries:
        for k in arguments.k:
            row = measure(queries, arguments.ranks, k, arguments.replays, rate, arguments.keys)
            rows.append({"queries": str(queries), "k": str(k)} | row)
            print(rows[-1], flush=True)
            torch.cuda.empty_cache()
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines += ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    lines += ["| " + " | ".join(row.get(name, "") for name in names) + " |" for row in rows]
    print("\n".join(lines[1:]))
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
