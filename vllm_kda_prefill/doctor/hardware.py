# SPDX-License-Identifier: Apache-2.0
"""The host's GPUs and their memory, as vLLM's own CUDA platform sees them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_kda_prefill.doctor.findings import Finding, green, red, yellow

GIB = 2**30
Capability = tuple[int, int]


@dataclass(frozen=True)
class Gpus:
    """The GPUs of this host; all are taken to be like the first.

    Attributes:
        count: How many this process may use.
        name: Of the first.
        capability: Its compute capability; None where it is not known.
        total: Bytes of its memory; None where they are not known.
        free: Bytes that are free; None where they are not known.
        unified: Whether it has no memory of its own and shares the host's.
        problem: Why no GPU was found, or an empty string.
    """

    count: int = 0
    name: str = ""
    capability: Capability | None = None
    total: int | None = None
    free: int | None = None
    unified: bool = False
    problem: str = ""


def find_gpus() -> Gpus:
    """Ask NVML, as vLLM does; nothing is put on a GPU, and what goes wrong is a `problem`."""
    try:
        from vllm.platforms import cuda_platform_plugin

        if cuda_platform_plugin() is None:
            return Gpus(problem="NVML reports no NVIDIA GPU")
        from vllm.platforms.cuda import CudaPlatform

        count = CudaPlatform.device_count()
        if count < 1:
            return Gpus(problem="CUDA_VISIBLE_DEVICES or torch leaves no GPU to this process")
        capability = CudaPlatform.get_device_capability(0)
        total, free, unified = _memory(CudaPlatform)
        return Gpus(
            count=count,
            name=str(CudaPlatform.get_device_name(0)),
            capability=(capability.major, capability.minor) if capability is not None else None,
            total=total,
            free=free,
            unified=unified,
        )
    except Exception as error:  # A driver, a library or a variable may be wrong in any way; it is one line.
        return Gpus(problem=f"{type(error).__name__}: {error}")


def _memory(platform: type) -> tuple[int | None, int | None, bool]:
    """Total bytes, free bytes, and whether the memory is the host's: NVML has no figures then, as on a GB10."""
    from vllm.utils.import_utils import import_pynvml

    pynvml = import_pynvml()
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(platform.device_id_to_physical_device_id(0))  # type: ignore[attr-defined]
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.total), int(memory.free), False
    except pynvml.NVMLError:
        import psutil

        host = psutil.virtual_memory()
        return int(host.total), int(host.available), True


def gpu_finding(gpus: Gpus, assumed: Capability | None) -> Finding:
    """Whether there is a GPU that exports states.

    Args:
        gpus: Of this host.
        assumed: The compute capability that `--capability` gives, for a host without the GPU.
    """
    from vllm.plugins.kda_prefill_coalescing.config_check import KERNEL_CAPABILITIES

    capability = assumed or gpus.capability
    if capability is None:
        found = gpus.problem or f"the compute capability of {gpus.name or 'the GPU'} cannot be read"
        return red("gpu", f"no usable CUDA GPU: {found}", "run it where the server runs, or give --capability 12.1")
    if capability[0] not in KERNEL_CAPABILITIES:
        return red(
            "gpu", f"{_named(gpus, capability)}: no kernel exports states there", "use SM90 (H100), SM10x or SM12x"
        )
    if assumed is not None and assumed != gpus.capability:
        return yellow(
            "gpu",
            f"checked as for SM{assumed[0]}{assumed[1]}; here is {_named(gpus, gpus.capability)}",
            "run it on the host that serves as well",
        )
    return green("gpu", _named(gpus, capability))


def _named(gpus: Gpus, capability: Capability | None) -> str:
    if not gpus.count:
        return "no GPU" if capability is None else f"SM{capability[0]}{capability[1]}"
    arch = f", SM{capability[0]}{capability[1]}" if capability is not None else ""
    return f"{gpus.count} × {gpus.name}{arch}"


def ranks_finding(gpus: Gpus, ranks: int, has_ray: bool) -> Finding:
    """Whether this host has a GPU for each rank.

    Args:
        gpus: Of this host.
        ranks: Tensor parallel ranks.
        has_ray: Whether Ray is installed.
    """
    if ranks <= gpus.count:
        return green("ranks", f"--tp {ranks} on a host of {gpus.count}")
    found = f"--tp {ranks} needs {ranks} GPUs, this host has {gpus.count}"
    ray = "" if has_ray else "pip install ray on every host; "
    return yellow("ranks", found, f"{ray}run doctor on every host; --distributed-executor-backend ray joins them")


@dataclass(frozen=True)
class Need:
    """What a rank needs of its memory.

    Attributes:
        utilization: vLLM's `--gpu-memory-utilization`.
        weights: Bytes of the model's files over the ranks; None where they are not known.
        tokens: Tokens of cache in what weights leave, as vLLM counts them; None where they are not known.
        longest: Tokens of the longest request.
    """

    utilization: float
    weights: int | None = None
    tokens: int | None = None
    longest: int = 0


def budget(gpus: Gpus, utilization: float) -> int | None:
    """Bytes that vLLM will ask for on a GPU; None where its memory is not known."""
    return None if gpus.total is None else math.ceil(gpus.total * utilization)


def memory_finding(gpus: Gpus, need: Need) -> Finding:
    """Whether the memory is free that vLLM asks for, and whether weights and one request fit."""
    asked = budget(gpus, need.utilization)
    if asked is None or gpus.total is None or gpus.free is None:
        return yellow("memory", "the GPU's memory is not known", "run it where the server runs")
    kind = "shared with the host, " if gpus.unified else ""
    found = f"{kind}{_gib(gpus.free)} of {_gib(gpus.total)} free, vLLM asks for {_gib(asked)}"
    if gpus.free < asked:
        most = math.floor(gpus.free / gpus.total * 100) / 100
        caches = ", or free the page cache: sync; echo 3 > /proc/sys/vm/drop_caches" if gpus.unified else ""
        return red("memory", found, f"end other processes, or --gpu-memory-utilization {most:.2f}{caches}")
    if need.weights is None:
        return yellow("memory", f"{found}; the weights are not here", "give --model, a folder with its safetensors")
    found += f"; weights take {_gib(need.weights)} a rank"
    if need.weights >= asked:
        return red("memory", found, "give more --tp ranks, or weights of fewer bits (NVFP4)")
    if need.tokens is None:
        return green("memory", found)
    found += f" and leave {need.tokens:,} tokens of cache at most"
    if need.tokens < need.longest:
        return red("memory", found, f"give --max-model-len below {max(need.tokens, 1):,}, or more --tp ranks")
    return green("memory", found)


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f} GiB"
