# SPDX-License-Identifier: Apache-2.0
"""Several ranks of one engine on a single GPU.

NCCL takes one rank a GPU. Here the ranks' collectives go through shared memory of the host instead, as a backend of
torch.distributed that vLLM is made to use. So vLLM's own all-reduce and what it writes straight to other ranks' memory
are not run; workers, kernels and KV caches are what several GPUs would run. Eager only, on x86 (what a rank writes is
seen in order), and no time in it means anything. `KDA_ONE_GPU_RANKS`, the number of ranks, switches it on.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

RANKS = "KDA_ONE_GPU_RANKS"
BACKEND = "one_gpu"
CAPACITY = 32 << 20
"""Bytes a rank hands over at a time."""
HEADER = 4096
"""Bytes before them: how often the rank came to a barrier."""
TIMEOUT = 300.0
"""Seconds to wait for the other ranks, which may compile a kernel meanwhile."""


class Segments:
    """A segment of shared memory of each rank of a group, which its owner alone writes to.

    Args:
        store: Where the ranks tell each other their segments' names.
        rank: This process's rank in the group.
        size: Ranks in the group.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        descriptor, name = tempfile.mkstemp(prefix="one-gpu-", dir="/dev/shm")
        os.ftruncate(descriptor, HEADER + CAPACITY)
        os.close(descriptor)
        maps = []
        try:
            store.set(f"segment-{rank}", name)
            for other in range(size):
                with open(store.get(f"segment-{other}").decode(), "r+b") as file:
                    maps.append(mmap.mmap(file.fileno(), HEADER + CAPACITY))
            self._arrivals = [np.frombuffer(memory, np.int64, 1) for memory in maps]
            self._data = [torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER) for memory in maps]
            self._count = 0
            self.barrier()  # Everyone has it open.
        finally:
            Path(name).unlink()

    def barrier(self) -> None:
        """Wait until every rank has come here as often as this one.

        Raises:
            TimeoutError: A rank did not.
        """
        self._count += 1
        self._arrivals[self.rank][0] = self._count
        deadline = time.monotonic() + TIMEOUT
        for other, arrivals in enumerate(self._arrivals):
            spins = 0
            while arrivals[0] < self._count:
                spins += 1
                time.sleep(0 if spins < 2000 else 1e-4)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {other} of {self.size} did not come to a collective within {TIMEOUT} s")

    def exchange(
        self, tensor: torch.Tensor, sources: range | None = None, destination: int | None = None
    ) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order; all ranks pass the same shape and dtype.

        Args:
            tensor: What this rank hands over, on any device.
            sources: Ranks whose tensors are wanted, all by default; the same for every rank.
            destination: The one rank that gets them, all by default; the same for every rank. Others get none.
        """
        sources = sources or range(self.size)
        mine = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        results = [torch.empty_like(mine) for _ in sources] if destination in (None, self.rank) else []
        for start in range(0, mine.numel(), CAPACITY):
            piece = slice(start, min(start + CAPACITY, mine.numel()))
            length = piece.stop - piece.start
            if self.rank in sources:
                self._data[self.rank][:length].copy_(mine[piece])
            self.barrier()
            for source, result in zip(sources, results, strict=bool(results)):
                result[piece].copy_(self._data[source][:length])
            self.barrier()
        return [result.view(tensor.dtype).view(tensor.shape) for result in results]


class Done(dist._Work):  # type: ignore[name-defined, misc]
    """A collective that is over when it returns."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class OneGpuGroup(dist.ProcessGroup):
    """The collectives that vLLM asks a device group for. Sums are in float32 and in rank order."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any = None) -> None:
        super().__init__(rank, size)
        self._name = ""
        self._segments = Segments(store, rank, size) if size > 1 else None
        self._rank, self._size = rank, size

    def getBackendName(self) -> str:
        return BACKEND

    # A group in Python has no place for its name in every version of torch, and is ended by it.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def _exchange(
        self, tensor: torch.Tensor, sources: range | None = None, destination: int | None = None
    ) -> list[torch.Tensor]:
        return self._segments.exchange(tensor, sources, destination) if self._segments else [tensor]

    def _slices(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """This rank's slice of every rank's tensor. The others are not received: with DCP they are gigabytes."""
        mine = []
        for rank, part in enumerate(tensor.reshape(self._size, tensor.numel() // self._size)):
            mine += self._exchange(part, destination=rank)
        return mine

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Done:
        for tensor in tensors:
            tensor.copy_(_reduced(self._exchange(tensor), options.reduceOp))
        return Done()

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, options: Any = None) -> Done:
        for part, received in zip(output.view(self._size, *tensor.shape), self._exchange(tensor), strict=True):
            part.copy_(received)
        return Done()

    def allgather(self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any = None) -> Done:
        for parts, tensor in zip(outputs, tensors, strict=True):
            for part, received in zip(parts, self._exchange(tensor), strict=True):
                part.copy_(received)
        return Done()

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> Done:
        output.copy_(_reduced(self._slices(tensor), options.reduceOp).view(output.shape))
        return Done()

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        options: Any = None,
    ) -> Done:
        if output_split_sizes or input_split_sizes:
            raise NotImplementedError("parts of different sizes")
        output.view(-1).copy_(torch.cat(self._slices(tensor)))
        return Done()

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Done:
        root = options.rootRank
        for tensor in tensors:
            tensor.copy_(self._exchange(tensor, range(root, root + 1))[0])
        return Done()

    # What newer versions of torch call the same three.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def gather(self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any) -> Done:
        received = self._exchange(tensors[0], destination=options.rootRank)
        if self._rank == options.rootRank:
            for part, tensor in zip(outputs[0], received, strict=True):
                part.copy_(tensor)
        return Done()

    def barrier(self, options: Any = None) -> Done:
        if self._segments:
            self._segments.barrier()
        return Done()


REDUCTIONS: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


def _reduced(parts: list[torch.Tensor], op: Any) -> torch.Tensor:
    # torch passes what is equal to one of them, in this order only, so no key finds it.
    reduce = next((reduce for known, reduce in REDUCTIONS.items() if op == known), None)
    if reduce is None:
        raise NotImplementedError(f"reduction {op}")
    first, *others = parts
    if first.dtype in (torch.float16, torch.bfloat16):
        first = first.float()  # And with it the result so far.
    return functools.reduce(reduce, others, first).to(parts[0].dtype)


class Communicator(DeviceCommunicatorBase):
    """vLLM's device communicator over such a group."""

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        output = input_.clone()  # The custom op around this may not return what it was given.
        dist.all_reduce(output, group=self.device_group)
        return output

    def all_gatherv(
        self, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(input_, list):
            return [self._all_gatherv(one, dim, sizes) for one in input_]
        return self._all_gatherv(input_, dim, sizes)

    def _all_gatherv(self, input_: torch.Tensor, dim: int, sizes: list[int] | None) -> torch.Tensor:
        if sizes is None:
            return self.all_gather(input_, dim)
        padded = input_.new_zeros(max(sizes), *input_.movedim(dim, 0).shape[1:])
        padded[: input_.shape[dim]] = input_.movedim(dim, 0)
        parts = self.all_gather(padded.unsqueeze(0), 0)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).movedim(0, dim)


def register_backend() -> None:
    """Make the backend known to torch.distributed; may run any number of times."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, OneGpuGroup, devices=["cpu", "cuda"])


def install() -> None:
    """Have vLLM put all ranks on the first GPU and use the backend; may run any number of times."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    ranks = int(os.environ[RANKS])
    register_backend()
    platform = type(current_platform)
    platform.dist_backend = BACKEND
    platform.get_device_communicator_cls = classmethod(  # type: ignore[method-assign, assignment]
        lambda cls: f"{Communicator.__module__}.{Communicator.__qualname__}"
    )
    EngineArgs._resolve_device_ids = lambda self: [0] * ranks  # type: ignore[method-assign]


def environment(ranks: int) -> dict[str, str]:
    """What an engine's process needs in its environment for so many ranks on one GPU."""
    root = str(Path(__file__).parents[2])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {
        RANKS: str(ranks),
        "PYTHONPATH": os.pathsep.join([path for path in paths if path and path != root] + [root]),
        # These write to other ranks' memory over NVLink.
        **{f"VLLM_USE_DIRECT_DCP_{name}": "0" for name in ("A2A", "Q_GATHER", "KV_GATHER")},
    }


@contextlib.contextmanager
def group(rank: int, size: int, port: int) -> Iterator[dist.ProcessGroup]:
    """The default group of torch.distributed with this backend, for a test without vLLM."""
    register_backend()
    dist.init_process_group(BACKEND, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
