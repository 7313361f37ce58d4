# SPDX-License-Identifier: Apache-2.0
"""Where the interior states of a prefill go, and the one check of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import index as as_integer
from typing import Protocol

import torch

from vllm.v1.core.prefill_plan import CHECKPOINT_ALIGNMENT, MAX_CHECKPOINTS


class CheckpointMetadata(Protocol):
    """Where interior states go; attention metadata that has these fields is taken as it is.

    An entry of a row is inactive where its offset or its state index is 0.

    Attributes:
        checkpoint_offsets: int32 `[N, 4]` on the device, tokens after the row's start.
        state_indices: int32 `[N, 4]` on the device, rows of the state pool.
        host_offsets: The offsets on the host, up to four a row.
        host_query_lens: Tokens of each row.
        host_state_indices: The state indices on the host; None where only the device knows them.
        validated_for: Rows, states of the pool and tokens for which `validate_checkpoints` found this object
            right; None at first. All layers of a step share one object, and it is read once. To change a field,
            make a new object with `dataclasses.replace`, which is checked anew.
    """

    validated_for: tuple[int, int, int] | None

    @property
    def checkpoint_offsets(self) -> torch.Tensor: ...
    @property
    def state_indices(self) -> torch.Tensor: ...
    @property
    def host_offsets(self) -> Sequence[Sequence[int]]: ...
    @property
    def host_query_lens(self) -> Sequence[int]: ...
    @property
    def host_state_indices(self) -> Sequence[Sequence[int]] | None: ...


@dataclass
class Checkpoints:
    """`CheckpointMetadata` of a caller that has no attention metadata: a warm-up, a benchmark, a test."""

    checkpoint_offsets: torch.Tensor
    state_indices: torch.Tensor
    host_offsets: Sequence[Sequence[int]]
    host_query_lens: Sequence[int]
    host_state_indices: Sequence[Sequence[int]] | None = None
    validated_for: tuple[int, int, int] | None = field(default=None, init=False, compare=False)

    @classmethod
    def from_host(
        cls,
        offsets: Sequence[Sequence[int]],
        state_indices: Sequence[Sequence[int]],
        query_lens: Sequence[int],
        device: torch.device | str,
    ) -> Checkpoints:
        """Upload host lists, padding every row to four entries."""

        def pad(rows: Sequence[Sequence[int]]) -> torch.Tensor:
            padded = [list(row) + [0] * (MAX_CHECKPOINTS - len(row)) for row in rows]
            return torch.tensor(padded, dtype=torch.int32).reshape(-1, MAX_CHECKPOINTS).to(device)

        return cls(pad(offsets), pad(state_indices), offsets, query_lens, state_indices)


def check_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise `ValueError`, naming both sides, where a tensor has another dtype or shape."""
    if tensor.dtype != dtype or tensor.shape != shape:
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected {dtype} {tuple(shape)}")


def validate_checkpoints(checkpoints: CheckpointMetadata, num_rows: int, num_states: int, num_tokens: int) -> None:
    """Check checkpoint metadata against a batch, all of it, once an object: the next layer's call does nothing.

    Args:
        checkpoints: The metadata; it remembers that it was found right.
        num_rows: Rows of the batch.
        num_states: States of the pool.
        num_tokens: Tokens of the batch.

    Raises:
        ValueError: One line that names the row, the value and the rule.
    """
    batch = (num_rows, num_states, num_tokens)
    if checkpoints.validated_for == batch:
        return
    shape = (num_rows, MAX_CHECKPOINTS)
    check_tensor("checkpoint_offsets", checkpoints.checkpoint_offsets, torch.int32, shape)
    check_tensor("checkpoint state_indices", checkpoints.state_indices, torch.int32, shape)
    state_indices = checkpoints.host_state_indices
    lists = (checkpoints.host_offsets, checkpoints.host_query_lens, state_indices)
    if any(len(rows) != num_rows for rows in lists if rows is not None):
        raise ValueError(f"host checkpoint metadata does not cover {num_rows} rows")
    _check_lengths(checkpoints.host_query_lens, num_tokens)
    for row, offsets in enumerate(checkpoints.host_offsets):
        _check_offsets(row, offsets, checkpoints.host_query_lens[row])
    if state_indices is not None:
        _check_state_indices(checkpoints.host_offsets, state_indices, num_states)
    checkpoints.validated_for = batch


def _check_lengths(query_lens: Sequence[int], num_tokens: int) -> None:
    total = 0
    for row, value in enumerate(query_lens):
        length = _integer("query length", row, value)
        if length < 0:
            raise ValueError(f"row {row}: query length {length} is negative")
        total += length
    if total > num_tokens:
        raise ValueError(f"query lengths sum to {total}; the batch has {num_tokens} tokens")


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
        if offset % CHECKPOINT_ALIGNMENT:
            raise ValueError(
                f"row {row}: checkpoint offset {offset} is not a multiple of {CHECKPOINT_ALIGNMENT} tokens"
            )
        if offset in seen:
            raise ValueError(f"row {row}: checkpoint offset {offset} is given twice")
        seen.add(offset)


def _check_state_indices(
    all_offsets: Sequence[Sequence[int]], all_state_indices: Sequence[Sequence[int]], num_states: int
) -> None:
    owner: dict[int, int] = {}
    for row, (offsets, state_indices) in enumerate(zip(all_offsets, all_state_indices, strict=True)):
        if len(state_indices) != len(offsets):
            raise ValueError(
                f"row {row}: {len(state_indices)} checkpoint state indices for {len(offsets)} checkpoint offsets"
            )
        for offset, value in zip(offsets, state_indices, strict=True):
            index = _integer("checkpoint state index", row, value)
            if (offset != 0) != (index != 0):
                raise ValueError(
                    f"row {row}: checkpoint offset {offset} with state index {index}; both must be set or both 0"
                )
            if index == 0:
                continue
            if not 0 < index < num_states:
                raise ValueError(
                    f"row {row}: checkpoint state index {index} is outside the pool of {num_states} states"
                )
            if index in owner:
                raise ValueError(f"row {row}: checkpoint state index {index} is already taken by row {owner[index]}")
            owner[index] = row


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
