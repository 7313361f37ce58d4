# SPDX-License-Identifier: Apache-2.0
"""What every KDA prefill provider takes, checks and promises.

A provider runs one packed batch of prefill rows through the gated delta rule and leaves, besides the
output, the final state of every row and up to four interior states in one state pool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from .checkpoints import CheckpointMetadata, check_tensor, validate_checkpoints

HEAD_DIM = 128
"""Key and value size of a head; the kernels have no other."""

WorkspaceSpec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one scratch buffer."""


@dataclass(frozen=True)
class KDAPrefillInputs:
    """One packed batch of `N` rows and `T` tokens with `H` heads.

    Row `i` starts from `state_pool[state_indices[i]]` where `has_initial_state[i]` holds, else from zero, and
    leaves its final state at the same index. Indices at or below 0 (the null block) or past the pool are never
    written.

    Attributes:
        q: bf16 `[1, T, H, 128]`, before l2 normalisation.
        k: As `q`.
        v: As `q`, and not normalised.
        g: As `q`, raw gate logits.
        beta: bf16 `[1, T, H]`, raw logits, rows may be strided.
        A_log: fp32 `[H]`.
        dt_bias: fp32 `[H, 128]`.
        scale: Factor of the output.
        lower_bound: Smallest log decay of a token, in `[-5, 0)`.
        cu_seqlens: int32 `[N + 1]`, ends at most at `T`.
        state_pool: fp32 `[states, H, 128 (value), 128 (key)]`, each state contiguous, any stride between them.
        state_indices: int32 `[N]`.
        has_initial_state: bool `[N]`.
        out: bf16 `[1, T, H, 128]`, contiguous; filled.
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


@runtime_checkable
class ExportingLayer(Protocol):
    """A layer that exports states, as the worker sees it."""

    def warm_up_export(self) -> None:
        """Compile what the first export would compile while its request waits; write nothing."""


class KDAPrefill(ABC):
    """One way to compute KDA prefill with exported states.

    Attributes:
        name: What the log calls it.
        defers_to_stock: Whether a layer leaves a batch without checkpoints to its stock kernel, because the provider
            is that kernel with more launches.
    """

    name: str
    defers_to_stock: bool = False

    @abstractmethod
    def workspace_specs(self) -> tuple[WorkspaceSpec, ...]:
        """Scratch buffers that `run` needs at the planned capacity."""

    @abstractmethod
    def _launch(
        self,
        inputs: KDAPrefillInputs,
        checkpoints: CheckpointMetadata | None,
        workspace: tuple[torch.Tensor, ...],
    ) -> None:
        """Compute; everything has been validated."""

    def validate(self, inputs: KDAPrefillInputs, checkpoints: CheckpointMetadata | None = None) -> None:
        """Check one batch; launch nothing.

        Raises:
            ValueError: One line that names the row, the value and the rule.
        """
        validate_inputs(inputs)
        if checkpoints is not None:
            validate_checkpoints(checkpoints, inputs.num_rows, inputs.state_pool.shape[0], inputs.q.shape[1])

    def warm_up(self, state_pool: torch.Tensor) -> None:
        """Compile what the first `run` on this pool would compile while its request waits; write nothing."""
        del state_pool  # Most providers are compiled once they are made.

    def run(
        self,
        inputs: KDAPrefillInputs,
        checkpoints: CheckpointMetadata | None = None,
        workspace: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        """Validate, then fill `inputs.out` and write final and checkpoint states to the pool.

        Args:
            inputs: The batch.
            checkpoints: Interior states to export; None for none.
            workspace: One tensor for each of `workspace_specs`; allocated where it is left out.

        Raises:
            ValueError: The batch or the metadata is wrong; nothing has been written.
        """
        self.validate(inputs, checkpoints)
        if workspace is None:
            workspace = tuple(
                torch.empty(shape, dtype=dtype, device=inputs.q.device) for shape, dtype in self.workspace_specs()
            )
        self._launch(inputs, checkpoints, workspace)


# Messages are built only when a rule is broken: tensors are checked once a layer.


def validate_inputs(inputs: KDAPrefillInputs) -> None:
    """Check shapes, dtypes and strides of one batch (host data only).

    Raises:
        ValueError: A tensor is not as `KDAPrefillInputs` says.
    """
    shape = inputs.q.shape
    if len(shape) != 4 or shape[0] != 1 or shape[3] != HEAD_DIM:
        raise ValueError(f"q has shape {tuple(shape)}; expected [1, tokens, heads, {HEAD_DIM}]")
    heads, rows = shape[2], inputs.num_rows
    bf16, fp32 = torch.bfloat16, torch.float32
    for name in ("q", "k", "v", "g", "out"):
        check_tensor(name, getattr(inputs, name), bf16, shape)
    if not inputs.out.is_contiguous():
        raise ValueError("out is not contiguous")
    check_tensor("beta", inputs.beta, bf16, shape[:3])
    check_tensor("A_log", inputs.A_log, fp32, (heads,))
    check_tensor("dt_bias", inputs.dt_bias, fp32, (heads, HEAD_DIM))
    if not -5.0 <= inputs.lower_bound < 0.0:
        raise ValueError(f"lower_bound is {inputs.lower_bound}; expected a value in [-5, 0)")
    pool = inputs.state_pool
    check_tensor("state_pool", pool, fp32, (pool.shape[0], heads, HEAD_DIM, HEAD_DIM))
    if pool.stride()[1:] != (HEAD_DIM * HEAD_DIM, HEAD_DIM, 1):
        raise ValueError(f"state_pool has strides {pool.stride()}; each state must be contiguous")
    check_tensor("cu_seqlens", inputs.cu_seqlens, torch.int32, (rows + 1,))
    check_tensor("state_indices", inputs.state_indices, torch.int32, (rows,))
    check_tensor("has_initial_state", inputs.has_initial_state, torch.bool, (rows,))
