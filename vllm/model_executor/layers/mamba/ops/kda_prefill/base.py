"""What every KDA prefill provider takes, checks and promises.

A provider runs one packed batch of prefill rows through the gated delta rule and leaves, besides the
output, the final state of every row and up to four interior states in pages ("slots") of one state pool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index as as_integer

import torch

HEAD_DIM = 128
CHUNK = 16
MAX_CHECKPOINTS = 4

WorkspaceSpec = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class KDAPrefillInputs:
    """One packed batch of ``N`` rows and ``T`` tokens with ``H`` heads.

    ``q``, ``k``, ``v``, ``g`` are bf16 ``[1, T, H, 128]``: q and k before l2 normalisation, g the raw gate
    logits. ``beta`` is bf16 ``[1, T, H]``, raw logits, rows may be strided. ``A_log`` is fp32 ``[H]``,
    ``dt_bias`` fp32 ``[H, 128]``. ``lower_bound`` is the smallest log decay of a token, in ``[-5, 0)``.
    ``cu_seqlens`` is int32 ``[N + 1]`` and ends at most at ``T``.

    ``state_pool`` is fp32 ``[slots, H, 128 (value), 128 (key)]``, each slot contiguous, any slot stride.
    Row ``i`` starts from slot ``state_indices[i]`` where ``has_initial_state[i]`` holds, else from zero, and
    leaves its final state in the same slot. Slots at or below 0 (the null page) or past the pool are never
    written. ``out`` is bf16 ``[1, T, H, 128]``, contiguous.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    scale: float
    lower_bound: float
    cu_seqlens: torch.Tensor
    state_pool: torch.Tensor
    state_indices: torch.Tensor
    has_initial_state: torch.Tensor
    out: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.cu_seqlens.numel() - 1


@dataclass(frozen=True)
class CheckpointTargets:
    """Where interior states go: ``offsets`` and ``slots``, int32 ``[N, 4]`` on the device.

    ``offsets[i, j]`` counts tokens from the start of row ``i``; an entry whose offset or slot is 0 is
    inactive. ``host_offsets``, ``host_slots`` and ``query_lens`` are the host copies that are validated;
    ``host_slots`` may be missing where slots are known to the device only. ``host_state_indices``, when
    given, lets validation refuse a checkpoint on a page that a row of the same batch runs on.
    """

    offsets: torch.Tensor
    slots: torch.Tensor
    host_offsets: Sequence[Sequence[int]]
    query_lens: Sequence[int]
    host_slots: Sequence[Sequence[int]] | None = None
    host_state_indices: Sequence[int] | None = None

    @classmethod
    def from_host(
        cls,
        offsets: Sequence[Sequence[int]],
        slots: Sequence[Sequence[int]],
        query_lens: Sequence[int],
        device: torch.device | str,
    ) -> CheckpointTargets:
        """Upload host lists, padding every row to four entries."""

        def pad(rows: Sequence[Sequence[int]]) -> torch.Tensor:
            padded = [list(row) + [0] * (MAX_CHECKPOINTS - len(row)) for row in rows]
            return torch.tensor(padded, dtype=torch.int32).reshape(-1, MAX_CHECKPOINTS).to(device)

        return cls(pad(offsets), pad(slots), offsets, query_lens, slots)

    @property
    def any_active(self) -> bool:
        return any(any(row) for row in self.host_offsets)


class KDAPrefill(ABC):
    """One way to compute KDA prefill with exported states."""

    name: str
    max_checkpoints = MAX_CHECKPOINTS
    alignment = CHUNK

    @abstractmethod
    def workspace_specs(self) -> tuple[WorkspaceSpec, ...]:
        """Shapes and dtypes of the scratch buffers :meth:`run` needs at the planned capacity."""

    @abstractmethod
    def _launch(
        self,
        inputs: KDAPrefillInputs,
        targets: CheckpointTargets | None,
        workspace: tuple[torch.Tensor, ...],
    ) -> None:
        """Compute; everything has been validated."""

    def validate(self, inputs: KDAPrefillInputs, targets: CheckpointTargets | None = None) -> None:
        """Raise ``ValueError`` with one line naming the row, the value and the rule; launch nothing."""
        validate_inputs(inputs)
        if targets is not None:
            validate_targets(targets, inputs.num_rows, inputs.state_pool.shape[0], inputs.q.shape[1])

    def warm_up(self, state_pool: torch.Tensor) -> None:
        """Compile what the first :meth:`run` on this pool would compile while its request waits; write nothing."""
        del state_pool  # Most providers are compiled once they are made.

    def run(
        self,
        inputs: KDAPrefillInputs,
        targets: CheckpointTargets | None = None,
        workspace: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        """Validate, then fill ``inputs.out`` and the pool slots of final and checkpoint states.

        ``workspace`` holds one tensor per entry of :meth:`workspace_specs`; left out, it is allocated.
        Raises ``ValueError`` before anything is written when the metadata is wrong.
        """
        self.validate(inputs, targets)
        if workspace is None:
            workspace = tuple(
                torch.empty(shape, dtype=dtype, device=inputs.q.device) for shape, dtype in self.workspace_specs()
            )
        self._launch(inputs, targets, workspace)


# Messages are built only when a rule is broken: a run is validated once a layer.


def validate_inputs(inputs: KDAPrefillInputs) -> None:
    """Check shapes, dtypes and strides of one batch (host data only)."""
    shape = inputs.q.shape
    if len(shape) != 4 or shape[0] != 1 or shape[3] != HEAD_DIM:
        raise ValueError(f"q has shape {tuple(shape)}; expected [1, tokens, heads, {HEAD_DIM}]")
    heads, rows = shape[2], inputs.num_rows
    bf16, fp32 = torch.bfloat16, torch.float32
    for name in ("q", "k", "v", "g", "out"):
        _check_tensor(name, getattr(inputs, name), bf16, shape)
    if not inputs.out.is_contiguous():
        raise ValueError("out is not contiguous")
    _check_tensor("beta", inputs.beta, bf16, shape[:3])
    _check_tensor("A_log", inputs.A_log, fp32, (heads,))
    _check_tensor("dt_bias", inputs.dt_bias, fp32, (heads, HEAD_DIM))
    if not -5.0 <= inputs.lower_bound < 0.0:
        raise ValueError(f"lower_bound is {inputs.lower_bound}; expected a value in [-5, 0)")
    pool = inputs.state_pool
    _check_tensor("state_pool", pool, fp32, (pool.shape[0], heads, HEAD_DIM, HEAD_DIM))
    if pool.stride()[1:] != (HEAD_DIM * HEAD_DIM, HEAD_DIM, 1):
        raise ValueError(f"state_pool has strides {pool.stride()}; each slot must be contiguous")
    _check_tensor("cu_seqlens", inputs.cu_seqlens, torch.int32, (rows + 1,))
    _check_tensor("state_indices", inputs.state_indices, torch.int32, (rows,))
    _check_tensor("has_initial_state", inputs.has_initial_state, torch.bool, (rows,))


def _check_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape:
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected {dtype} {tuple(shape)}")


def validate_targets(targets: CheckpointTargets, num_rows: int, pool_slots: int, num_tokens: int) -> None:
    """Check the host copies of the checkpoint metadata: all of it, before anything is written."""
    _check_tensor("checkpoint offsets", targets.offsets, torch.int32, (num_rows, MAX_CHECKPOINTS))
    _check_tensor("checkpoint slots", targets.slots, torch.int32, (num_rows, MAX_CHECKPOINTS))
    counts = [len(targets.host_offsets), len(targets.query_lens)]
    if targets.host_slots is not None:
        counts.append(len(targets.host_slots))
    if any(count != num_rows for count in counts):
        raise ValueError(f"host checkpoint metadata does not cover {num_rows} rows")
    total = 0
    for row, value in enumerate(targets.query_lens):
        length = _integer("query length", row, value)
        if length < 0:
            raise ValueError(f"row {row}: query length {length} is negative")
        total += length
    if total > num_tokens:
        raise ValueError(f"query lengths sum to {total}; the batch has {num_tokens} tokens")
    for row, offsets in enumerate(targets.host_offsets):
        _check_offsets(row, offsets, targets.query_lens[row])
    if targets.host_slots is not None:
        _check_slots(targets, pool_slots)


def _check_offsets(row: int, offsets: Sequence[int], length: int) -> None:
    if len(offsets) > MAX_CHECKPOINTS:
        raise ValueError(f"row {row}: {len(offsets)} checkpoints; at most {MAX_CHECKPOINTS} fit one launch")
    seen: set[int] = set()
    for value in offsets:
        offset = _integer("checkpoint offset", row, value)
        if offset == 0:
            continue
        if not 0 < offset < length:
            raise ValueError(f"row {row}: checkpoint offset {offset} is not inside the row of {length} tokens")
        if offset % CHUNK:
            raise ValueError(f"row {row}: checkpoint offset {offset} is not a multiple of {CHUNK} tokens")
        if offset in seen:
            raise ValueError(f"row {row}: checkpoint offset {offset} is given twice")
        seen.add(offset)


def _check_slots(targets: CheckpointTargets, pool_slots: int) -> None:
    assert targets.host_slots is not None
    running = set(targets.host_state_indices or ())
    owner: dict[int, int] = {}
    for row, (offsets, slots) in enumerate(zip(targets.host_offsets, targets.host_slots, strict=True)):
        if len(slots) != len(offsets):
            raise ValueError(f"row {row}: {len(slots)} checkpoint slots for {len(offsets)} checkpoint offsets")
        for offset, value in zip(offsets, slots, strict=True):
            slot = _integer("checkpoint slot", row, value)
            if (offset != 0) != (slot != 0):
                raise ValueError(f"row {row}: checkpoint offset {offset} with slot {slot}; both must be set or both 0")
            if slot == 0:
                continue
            if not 0 < slot < pool_slots:
                raise ValueError(f"row {row}: checkpoint slot {slot} is outside the pool of {pool_slots} slots")
            if slot in owner:
                raise ValueError(f"row {row}: checkpoint slot {slot} is already taken by row {owner[slot]}")
            if slot in running:
                raise ValueError(f"row {row}: checkpoint slot {slot} is a row's running state")
            owner[slot] = row


def _integer(what: str, row: int, value: object) -> int:
    if type(value) is int:
        return value
    try:
        number = as_integer(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ValueError(f"row {row}: {what} {value!r} is not an integer")
    return number
