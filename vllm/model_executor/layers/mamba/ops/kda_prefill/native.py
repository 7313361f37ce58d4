# SPDX-License-Identifier: Apache-2.0
"""The native kernel: one launch of two kernels, which read and write states in the pool."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from vllm.v1.core.prefill_plan import CHECKPOINT_ALIGNMENT, MAX_CHECKPOINTS

from .base import HEAD_DIM, KDAPrefill, KDAPrefillInputs, WorkspaceSpec
from .build import compiled_library, installed_library
from .checkpoints import CheckpointMetadata

CHUNK_TOKENS = 64
"""Tokens of one step of the recurrence, `kChunk` of `csrc/kda_prefill/common.cuh`; a test compares the two."""

# The workspace holds all heads of a batch with this many rows; batches of more rows run their heads in turns.
ROWS_AT_FULL_WIDTH = 4

_POINTERS = (
    "q k v g beta a_log dt_bias cu_seqlens state_indices has_initial_state checkpoint_offsets "
    "checkpoint_state_indices state_pool out workspace"
).split()
_STRIDES = "q_stride k_stride v_stride g_stride beta_stride state_stride num_states".split()
_COUNTS = "rows heads head_begin head_count max_chunks value_tiles".split()


class _Params(ctypes.Structure):
    """`kda::Params` of `csrc/kda_prefill/common.cuh`, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        ("scale", ctypes.c_float),
        ("lower_bound", ctypes.c_float),
        *((name, ctypes.c_int32) for name in _COUNTS),
    ]


@cache
def _library(capability: tuple[int, int]) -> ctypes.CDLL:
    """The library built ahead of time where it has code for this GPU, else one compiled on first use."""
    installed = installed_library()
    if installed is not None:
        library = _open(installed)
        if library.kda_prefill_check() == 0:
            return library
    library = _open(compiled_library(capability))
    code = library.kda_prefill_check()
    if code:
        raise RuntimeError(f"the native KDA prefill kernel cannot run here: {_message(library, code)}")
    return library


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.kda_prefill_error_string.restype = ctypes.c_char_p
    library.kda_prefill_launch.argtypes = [ctypes.POINTER(_Params), ctypes.c_int, ctypes.c_void_p]
    if library.kda_prefill_params_bytes() != ctypes.sizeof(_Params):
        raise RuntimeError(f"{path} does not match this version of its launcher; remove it")
    return library


def _message(library: ctypes.CDLL, code: int) -> str:
    return library.kda_prefill_error_string(code).decode()


def max_chunks(num_tokens: int, num_rows: int, checkpoints: bool) -> int:
    """Upper bound on the chunks of a batch: every row and every checkpoint may end a chunk early.

    Whatever the plan, no chunk but a row's last is shorter than `CHECKPOINT_ALIGNMENT` tokens.
    """
    cuts = num_rows * (1 + MAX_CHECKPOINTS * checkpoints)
    return min(num_tokens // CHUNK_TOKENS + cuts, num_tokens // CHECKPOINT_ALIGNMENT + num_rows)


def default_value_tiles(rows: int, heads: int, processors: int) -> int:
    """16-column value tiles of a recurrence block: the fewest whose blocks still run all at once."""
    for tiles in (1, 2):
        if rows * heads * HEAD_DIM // (16 * tiles) <= processors:
            return tiles
    return 4


class NativeKDAPrefill(KDAPrefill):
    """Chunked KDA prefill in CUDA C++ for SM90 and SM12x, `csrc/kda_prefill`.

    q, k, v and g may have any token stride that is a multiple of 8 elements. Nothing is allocated and the
    host never waits, so a launch can be captured in a CUDA graph and replayed with other lengths, offsets
    and state indices in the same tensors.

    Args:
        num_heads: Heads of this rank.
        max_num_tokens: Most tokens of one batch.
        max_num_seqs: Most rows of one batch.
        device: The GPU; the current one where it is left out.
        value_tiles: 16-column value tiles of a recurrence block, 1, 2 or 4; chosen by the batch where left out.

    Raises:
        RuntimeError: The kernel cannot be built or run here.
    """

    name = "native"

    def __init__(
        self,
        *,
        num_heads: int,
        max_num_tokens: int,
        max_num_seqs: int,
        device: torch.device | int | None = None,
        value_tiles: int | None = None,
    ) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._large_shared = properties.major == 9
        self._processors = properties.multi_processor_count
        self._library = _library((properties.major, properties.minor))
        self._record_bytes = int(self._library.kda_prefill_record_bytes())
        self._value_tiles = value_tiles
        full = max_chunks(max_num_tokens, min(max_num_seqs, ROWS_AT_FULL_WIDTH), True)
        self._records = max(full * num_heads, max_chunks(max_num_tokens, max_num_seqs, True))

    def workspace_specs(self) -> tuple[WorkspaceSpec, ...]:
        return (((self._records * self._record_bytes,), torch.uint8),)

    def validate(self, inputs: KDAPrefillInputs, checkpoints: CheckpointMetadata | None = None) -> None:
        super().validate(inputs, checkpoints)
        pool = inputs.state_pool
        if pool.stride(0) % 4 or pool.data_ptr() % 16:
            raise ValueError(f"state_pool's states (stride {pool.stride(0)}) are not at 16-byte boundaries")
        tables = (checkpoints.checkpoint_offsets, checkpoints.state_indices) if checkpoints is not None else ()
        if any(table.is_contiguous() and table.data_ptr() % 16 for table in tables):
            raise ValueError("checkpoint offsets and state indices do not start at 16-byte boundaries")
        chunks = max_chunks(inputs.q.shape[1], inputs.num_rows, checkpoints is not None)
        if chunks > self._records:
            raise ValueError(
                f"batch of {inputs.num_rows} rows and {inputs.q.shape[1]} tokens takes up to {chunks} chunks; "
                f"the workspace holds {self._records}"
            )

    def _launch(
        self,
        inputs: KDAPrefillInputs,
        checkpoints: CheckpointMetadata | None,
        workspace: tuple[torch.Tensor, ...],
    ) -> None:
        if inputs.num_rows == 0:
            return
        # Copies are made only of what the kernel cannot read in place; they live until it is on the stream.
        operands = {name: _strided(getattr(inputs, name)) for name in ("q", "k", "v", "g")}
        operands["beta"] = inputs.beta if inputs.beta.stride(2) == 1 else inputs.beta.contiguous()
        dense = {
            "a_log": inputs.A_log,
            "dt_bias": inputs.dt_bias,
            "cu_seqlens": inputs.cu_seqlens,
            "state_indices": inputs.state_indices,
            "has_initial_state": inputs.has_initial_state,
        }
        if checkpoints is not None:
            dense |= {
                "checkpoint_offsets": checkpoints.checkpoint_offsets,
                "checkpoint_state_indices": checkpoints.state_indices,
            }
        dense = {name: tensor.contiguous() for name, tensor in dense.items()}
        heads = inputs.q.shape[2]
        params = _Params(
            **{name: tensor.data_ptr() for name, tensor in (operands | dense).items()},
            **{f"{name}_stride": tensor.stride(1) for name, tensor in operands.items()},
            state_pool=inputs.state_pool.data_ptr(),
            state_stride=inputs.state_pool.stride(0),
            num_states=inputs.state_pool.shape[0],
            out=inputs.out.data_ptr(),
            workspace=workspace[0].data_ptr(),
            scale=inputs.scale,
            lower_bound=inputs.lower_bound,
            rows=inputs.num_rows,
            heads=heads,
            max_chunks=max_chunks(inputs.q.shape[1], inputs.num_rows, checkpoints is not None),
        )
        stream = torch.cuda.current_stream(inputs.q.device).cuda_stream
        # Turns of equal size: a head left over would take nearly as long as a full turn.
        most = min(heads, self._records // params.max_chunks) if params.max_chunks else heads
        step = -(-heads // -(-heads // most))
        for begin in range(0, heads, step):
            params.head_begin = begin
            params.head_count = min(step, heads - begin)
            params.value_tiles = self._value_tiles or default_value_tiles(
                inputs.num_rows, params.head_count, self._processors
            )
            code = self._library.kda_prefill_launch(ctypes.byref(params), self._large_shared, stream)
            if code:
                raise RuntimeError(f"the native KDA prefill kernel failed to launch: {_message(self._library, code)}")


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself where the kernel can read it: dense heads, 16-byte aligned tokens; else a copy."""
    dense = tensor.stride(3) == 1 and tensor.stride(2) == HEAD_DIM and tensor.stride(1) % 8 == 0
    return tensor if dense and tensor.data_ptr() % 16 == 0 else tensor.contiguous()
