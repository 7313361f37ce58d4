# SPDX-License-Identifier: Apache-2.0
"""Launcher over the `b12x` package's KDA prefill (1.5.1), for SM120 and SM121.

The package addresses states by index, so a launch gets a small pool of its own: initial, final and
checkpoint states behind the null one. Written against the package's interface; it needs an SM12x GPU to run.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from .base import HEAD_DIM, WorkspaceSpec
from .segmented import Launch, Launcher


class B12xLauncher(Launcher):
    """`b12x.sequence.kda_prefill`: steps of 16 tokens, fp32 states, one checkpoint a row.

    Args:
        num_heads: Heads of this rank.
        max_num_tokens: Most tokens of one batch.
        max_num_seqs: Most rows of one batch.
        device: Where the pool's indices are.
        op: The package's module; imported where it is left out.

    Raises:
        RuntimeError: It cannot run here.
    """

    name = "b12x"

    def __init__(
        self,
        *,
        num_heads: int,
        max_num_tokens: int,
        max_num_seqs: int,
        device: torch.device | str = "cuda",
        op: Any = None,
    ) -> None:
        if op is None:
            op = import_module("b12x.sequence.kda_prefill")
        if not op.is_supported():
            raise RuntimeError("the b12x package does not support this GPU or lacks its CuTe DSL")
        self._op = op
        self._max_num_seqs = max_num_seqs
        states = 3 * max_num_seqs + 1
        caps = op.Caps(
            device=torch.device(device),
            max_tokens=max_num_tokens,
            max_seqs=max_num_seqs,
            max_state_slots=states,
            heads=num_heads,
            checkpoint_export=True,
            null_state_index=0,
        )
        parameters = torch.empty(0, dtype=torch.float32)
        invocation = op.invocation_from_tensors(
            A_log=parameters, dt_bias=parameters, initial_state_indices=torch.empty(0, dtype=torch.int32)
        )
        self._plan = op.plan(caps, invocation=invocation)
        (scratch,) = self._plan.memory_requirements().scratch
        self._specs: tuple[WorkspaceSpec, ...] = (
            ((states, num_heads, HEAD_DIM, HEAD_DIM), torch.float32),
            (tuple(scratch.shape), scratch.dtype),
        )
        # Indices of the rows' initial, final and checkpoint states.
        self._indices = torch.arange(1, states, dtype=torch.int32, device=device).view(3, max_num_seqs)

    def workspace_specs(self) -> tuple[WorkspaceSpec, ...]:
        return self._specs

    def __call__(self, launch: Launch, workspace: tuple[torch.Tensor, ...]) -> None:
        pool, scratch = workspace
        rows, tokens = launch.initial.shape[0], launch.q.shape[1]
        first, final, inner = (self._indices[i, :rows] for i in range(3))
        starts = [1 + i * self._max_num_seqs for i in range(3)]
        pool[starts[0] : starts[0] + rows].copy_(launch.initial)
        offsets = launch.checkpoint_offsets
        if offsets is None:
            offsets = torch.zeros_like(first)
        binding = self._op.bind(
            self._plan,
            scratch=scratch,
            q=launch.q[0],
            k=launch.k[0],
            v=launch.v[0],
            raw_g=launch.g[0],
            raw_beta=launch.beta[0],
            A_log=launch.A_log,
            dt_bias=launch.dt_bias,
            recurrent_state=pool,
            cu_seqlens=launch.cu_seqlens,
            initial_state_indices=first,
            final_state_indices=final,
            checkpoint_state_indices=torch.where(offsets > 0, inner, 0),
            checkpoint_offsets=offsets,
            num_seqs=torch.full((1,), rows, dtype=torch.int32, device=first.device),
            num_tokens=torch.full((1,), tokens, dtype=torch.int32, device=first.device),
            output=launch.out[0],
        )
        self._op.run(
            binding,
            lower_bound=launch.lower_bound,
            scale=launch.scale,
            max_live_tokens=tokens,
            max_live_seqs=rows,
        )
        launch.final.copy_(pool[starts[1] : starts[1] + rows])
        if launch.checkpoint is not None:
            launch.checkpoint.copy_(pool[starts[2] : starts[2] + rows])
