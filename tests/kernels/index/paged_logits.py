# SPDX-License-Identifier: Apache-2.0
"""Runs DeepGEMM's paged logits for SM12x in a process of its own; `pretend_device.cpp` is preloaded into it.

    python paged_logits.py cpu|cuda ROWS HEADS QUERIES      prints a line of JSON for what the test looks at

On `cpu` a recording driver launches nothing. On `cuda` the SM12x kernel runs, built for the GPU at hand.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

HEAD_DIM = 128
LENGTHS = (1, 31, 32, 33, 0, 700, 64, 128, 513, 2048)
"""Rows of the index that each request has."""

SMS = 48


def load_deep_gemm() -> ModuleType:
    """vLLM's own DeepGEMM, without vLLM around it."""
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None
    assert vllm.submodule_search_locations is not None
    folders = (Path(location) / "third_party/deep_gemm" for location in vllm.submodule_search_locations)
    folder = next(folder for folder in folders if (folder / "_C.py").is_file())
    spec = importlib.util.spec_from_file_location("its_deep_gemm", folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Case:
    """Queries, an index in blocks of `rows`, and weights, the same values whatever the blocks.

    Attributes:
        queries: `[requests, next, heads, 128]` fp8.
        cache: `[blocks, rows, 1, 132]` uint8: a block has its rows' values first and then their fp32 scales, and lies
            apart from the next by the bytes of four more layers.
        weights: `[requests * next, heads]` fp32.
        lengths: `[requests, next]` int32, rows each query sees.
        table: `[requests, blocks of the longest]` int32.
        logits: `[requests * next, longest]` fp32, the reference.
    """

    def __init__(self, device: str, rows: int, heads: int, next_n: int) -> None:
        generator = torch.Generator().manual_seed(11)
        requests, longest = len(LENGTHS), max(LENGTHS)
        normal: Any = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
        values = normal(requests, longest, HEAD_DIM).to(torch.float8_e4m3fn)
        scales = torch.exp2(torch.randint(-6, 3, (requests, longest), generator=generator).float())
        self.queries = normal(requests, next_n, heads, HEAD_DIM).to(torch.float8_e4m3fn)
        self.weights = normal(requests * next_n, heads)
        ends = torch.tensor(LENGTHS, dtype=torch.int32)
        self.lengths = (ends[:, None] - torch.arange(next_n - 1, -1, -1, dtype=torch.int32)).clamp_min(0)
        self.logits = reference(self.queries, values, scales, self.weights)

        width = -(-longest // rows)
        order = torch.randperm(requests * width + 3, generator=generator)[: requests * width]
        self.table = order.to(torch.int32).view(requests, width)
        pool = torch.full((requests * width + 3, 5, rows * (HEAD_DIM + 4)), 0x7F, dtype=torch.uint8)
        blocks = pool[:, 2]
        padded = torch.nn.functional.pad
        extra = width * rows - longest
        by_block = padded(values.view(torch.uint8), (0, 0, 0, extra)).view(requests * width, rows * HEAD_DIM)
        blocks[order, : rows * HEAD_DIM] = by_block
        blocks[order, rows * HEAD_DIM :] = padded(scales, (0, extra)).view(requests * width, rows).view(torch.uint8)
        for name in ("queries", "weights", "lengths", "table", "logits"):
            setattr(self, name, getattr(self, name).to(device))
        self.cache = pool.to(device)[:, 2].unflatten(1, (rows, 1, HEAD_DIM + 4))

    def seen(self) -> torch.Tensor:
        """`[requests * next, longest]` bool: which logits a query may read."""
        columns = torch.arange(self.logits.shape[1], device=self.lengths.device)
        return columns < self.lengths.view(-1, 1)


def reference(queries: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum over heads of weight * relu(query . row), times the row's scale, in fp64."""
    requests, next_n, heads, _ = queries.shape
    products = torch.einsum("bnhd,bkd->bnhk", queries.double(), values.double()).relu()
    summed = torch.einsum("bnhk,bnh->bnk", products, weights.double().view(requests, next_n, heads))
    return (summed * scales.double()[:, None]).flatten(0, 1)


def score(case: Case, table: torch.Tensor, key: Any = None) -> torch.Tensor:
    """DeepGEMM's logits; `key` calls the GPU's kernel with tensors of the host."""
    ops = torch.ops.deep_gemm
    rows = case.cache.shape[1]

    def call(op: Any, *arguments: Any) -> torch.Tensor:
        return op(*arguments) if key is None else op.redispatch(key, *arguments)

    plan = call(ops.get_paged_mqa_logits_metadata.default, case.lengths, rows, SMS, None)
    return call(
        ops.fp8_fp4_paged_mqa_logits.default,
        *(case.queries, None, case.cache, case.weights, case.lengths, table, plan, case.logits.shape[1], None),
    )


def measure(rows: int, heads: int, next_n: int) -> dict[str, Any]:
    """What the SM12x kernel's logits are from the reference, and from those of another size of block."""
    found = {}
    for size in (rows, 96 - rows):
        case = Case("cuda", size, heads, next_n)
        found[size] = score(case, case.table).masked_fill(~case.seen(), 0.0)
        exact = case.logits.masked_fill(~case.seen(), 0.0)
        if size == rows:
            wrong = case.table.clone()
            wrong[5, [0, 1]] = wrong[5, [1, 0]]
            swapped = score(case, wrong).masked_fill(~case.seen(), 0.0)
            largest = exact.abs().max()
            error = float((found[size] - exact).abs().max() / largest)
            error_of_swapped = float((swapped - exact).abs().max() / largest)
    return {
        "error": error,
        "error of swapped blocks": error_of_swapped,
        "as with the other size": bool(torch.equal(found[32], found[64])),
    }


if __name__ == "__main__":
    device, (rows, heads, next_n) = sys.argv[1], map(int, sys.argv[2:])
    load_deep_gemm()
    if device == "cuda":
        print(json.dumps(measure(rows, heads, next_n)))
    else:
        case = Case(device, rows, heads, next_n)
        score(case, case.table, torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA))
