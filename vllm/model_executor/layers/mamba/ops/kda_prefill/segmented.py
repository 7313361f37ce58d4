# SPDX-License-Identifier: Apache-2.0
"""KDA prefill with four checkpoints over a kernel that returns one checkpoint and the final state.

A row with checkpoints `o1 < o2 < o3 < o4` is cut at `o2` and `o4`: the first launch exports `o1` and ends at `o2`,
the second exports `o3` and ends at `o4`, the last runs to the row's end. The kernel's own steps never straddle a
cut, because offsets are multiples of `CHECKPOINT_ALIGNMENT`; what a cut costs in precision is how the kernel rounds
the state it hands out. FlashKDA hands out bf16 values and goes on with a finer state itself, so behind a cut the
output can differ from one launch in the last bf16 bit wherever the gates let the old state live on. It is the
difference that ending the query there would make.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise

import torch

from vllm.v1.core.prefill_plan import MAX_CHECKPOINTS

from .base import HEAD_DIM, KDAPrefill, KDAPrefillInputs, WorkspaceSpec
from .checkpoints import CheckpointMetadata
from .segments import Segment, plan_segments
from .state_io import gather_states, scatter_states


@dataclass(frozen=True)
class Launch:
    """One kernel launch over `n` packed rows.

    Parameters of the layer are as in `KDAPrefillInputs`.

    Attributes:
        q: bf16 `[1, t, H, 128]`, contiguous, as are `k`, `v`, `g` and `out`.
        beta: bf16 `[1, t, H]`.
        cu_seqlens: int32 `[n + 1]`.
        initial: fp32 `[n, H, 128, 128]`, contiguous, as are `final` and `checkpoint`.
        final: Filled with each row's state at its end.
        checkpoint: Filled with each row's state after `checkpoint_offsets[i]` tokens; None where no row has one.
        checkpoint_offsets: int32 `[n]`, 0 where a row has none.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    out: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    scale: float
    lower_bound: float
    cu_seqlens: torch.Tensor
    initial: torch.Tensor
    final: torch.Tensor
    checkpoint: torch.Tensor | None
    checkpoint_offsets: torch.Tensor | None


class Launcher(ABC):
    """A kernel that runs packed rows and exports one interior state per row."""

    name: str

    @abstractmethod
    def workspace_specs(self) -> tuple[WorkspaceSpec, ...]:
        """Scratch the kernel needs at the planned capacity."""

    @abstractmethod
    def __call__(self, launch: Launch, workspace: tuple[torch.Tensor, ...]) -> None:
        """Fill `out`, `final` and `checkpoint` on the current stream."""


class SegmentedKDAPrefill(KDAPrefill):
    """Up to three launches of a one-checkpoint kernel; rows without a plan run in the first.

    Args:
        launcher: The kernel.
        num_heads: Heads of this rank.
        max_num_tokens: Most tokens of one batch.
        max_num_seqs: Most rows of one batch; it sizes the workspace.
    """

    defers_to_stock = True

    def __init__(self, launcher: Launcher, *, num_heads: int, max_num_tokens: int, max_num_seqs: int) -> None:
        self.name = launcher.name
        self._launcher = launcher
        self._num_heads = num_heads
        self._max_num_tokens = max_num_tokens
        self._max_num_seqs = max_num_seqs

    def workspace_specs(self) -> tuple[WorkspaceSpec, ...]:
        states = (self._max_num_seqs, self._num_heads, HEAD_DIM, HEAD_DIM)
        # Final states of a launch, and checkpoints. Initial states are gathered for the rows at hand only.
        return ((states, torch.float32),) * 2 + self._launcher.workspace_specs()

    def warm_up(self, state_pool: torch.Tensor) -> None:
        null = torch.zeros(1, dtype=torch.int32, device=state_pool.device)
        state = torch.zeros_like(state_pool[:1], memory_format=torch.contiguous_format)
        gather_states(state_pool, null, null.bool(), state)
        scatter_states(state_pool, null, state)

    def validate(self, inputs: KDAPrefillInputs, checkpoints: CheckpointMetadata | None = None) -> None:
        super().validate(inputs, checkpoints)
        if inputs.num_rows > self._max_num_seqs or inputs.q.shape[1] > self._max_num_tokens:
            raise ValueError(
                f"batch of {inputs.num_rows} rows and {inputs.q.shape[1]} tokens; the workspace holds "
                f"{self._max_num_seqs} and {self._max_num_tokens}"
            )

    def _launch(
        self,
        inputs: KDAPrefillInputs,
        checkpoints: CheckpointMetadata | None,
        workspace: tuple[torch.Tensor, ...],
    ) -> None:
        if inputs.num_rows == 0:
            return
        buffers, scratch = workspace[:2], workspace[2:]
        pool = inputs.state_pool
        initial = torch.empty((inputs.num_rows, *pool.shape[1:]), dtype=pool.dtype, device=pool.device)
        gather_states(pool, inputs.state_indices, inputs.has_initial_state, initial)
        if checkpoints is None or not any(map(any, checkpoints.host_offsets)):
            final = buffers[0][: inputs.num_rows]
            self._launcher(_whole_batch(inputs, initial, final), scratch)
            scatter_states(pool, inputs.state_indices, final)
            return
        _run_segments(inputs, checkpoints, self._launcher, (initial, *buffers), scratch)


def _run_segments(
    inputs: KDAPrefillInputs,
    checkpoints: CheckpointMetadata,
    launcher: Launcher,
    buffers: tuple[torch.Tensor, ...],
    scratch: tuple[torch.Tensor, ...],
) -> None:
    launches = plan_segments(checkpoints.host_offsets, checkpoints.host_query_lens)
    starts = [0]
    for length in checkpoints.host_query_lens:
        starts.append(starts[-1] + length)
    device = inputs.q.device
    # The null block's index stands behind the tables for segments that export nothing inside.
    given = checkpoints.state_indices
    index_table = torch.cat([given.flatten(), inputs.state_indices, given.new_zeros(1)])
    tables = _upload([_launch_tables(segments, inputs.num_rows) for segments in launches], index_table)
    source, target, checkpoint = buffers
    for number, (segments, table) in enumerate(zip(launches, tables, strict=True)):
        count = len(segments)
        if number:
            # Only rows with a further segment continue, in row order, so their states are picked out.
            rows = {segment.row: i for i, segment in enumerate(launches[number - 1])}
            picked = [rows[segment.row] for segment in segments]
            source, target = target, source
            if picked != list(range(count)):
                source[:count] = source[torch.tensor(picked, device=device)]
        offsets = table["offsets"] if any(segment.offset for segment in segments) else None
        ranges = [(starts[s.row] + s.begin, starts[s.row] + s.end) for s in segments]
        tokens = _Tokens(inputs, ranges)
        launcher(
            Launch(
                tokens.q,
                tokens.k,
                tokens.v,
                tokens.g,
                tokens.beta,
                tokens.out,
                inputs.A_log,
                inputs.dt_bias,
                inputs.scale,
                inputs.lower_bound,
                table["cu_seqlens"],
                source[:count],
                target[:count],
                checkpoint[:count] if offsets is not None else None,
                offsets,
            ),
            scratch,
        )
        tokens.store()
        if offsets is not None:
            scatter_states(inputs.state_pool, table["checkpoint"], checkpoint[:count])
        scatter_states(inputs.state_pool, table["final"], target[:count])


_INDEX_TABLES = ("checkpoint", "final")


def _launch_tables(segments: list[Segment], num_rows: int) -> dict[str, list[int]]:
    """Host tables of one launch; state indices as places in the flattened index table."""
    cu_seqlens = [0]
    for segment in segments:
        cu_seqlens.append(cu_seqlens[-1] + segment.end - segment.begin)
    own = MAX_CHECKPOINTS * num_rows
    null = own + num_rows
    return {
        "cu_seqlens": cu_seqlens,
        "offsets": [segment.offset for segment in segments],
        "checkpoint": [MAX_CHECKPOINTS * s.row + s.checkpoint if s.checkpoint >= 0 else null for s in segments],
        "final": [MAX_CHECKPOINTS * s.row + s.final if s.final >= 0 else own + s.row for s in segments],
    }


def _upload(tables: list[dict[str, list[int]]], index_table: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Send all launches' tables in one copy and look all state indices up at once; vectors at 16-byte boundaries."""
    flat: list[int] = []
    places: list[dict[str, slice]] = [{} for _ in tables]
    indices_end = 0
    for names in (_INDEX_TABLES, ("cu_seqlens", "offsets")):
        for place, table in zip(places, tables, strict=True):
            for name in names:
                place[name] = slice(len(flat), len(flat) + len(table[name]))
                flat += table[name]
                flat += [0] * (-len(flat) % 4)
        indices_end = indices_end or len(flat)
    host = torch.tensor(flat, dtype=torch.int32, pin_memory=index_table.is_cuda)
    packed = host.to(index_table.device, non_blocking=True)
    state_indices = index_table.index_select(0, packed[:indices_end])
    return [
        {name: (state_indices if name in _INDEX_TABLES else packed)[part] for name, part in place.items()}
        for place in places
    ]


class _Tokens:
    """The tokens of one launch: slices where its ranges adjoin, else packed copies."""

    def __init__(self, inputs: KDAPrefillInputs, ranges: list[tuple[int, int]]) -> None:
        self._inputs = inputs
        self._indices: torch.Tensor | None = None
        sources = (inputs.q, inputs.k, inputs.v, inputs.g)
        if all(left[1] == right[0] for left, right in pairwise(ranges)):
            window = slice(ranges[0][0], ranges[-1][1])
            self.q, self.k, self.v, self.g = (t[:, window].contiguous() for t in sources)
            self.beta, self.out = inputs.beta[:, window], inputs.out[:, window]
        else:
            device = inputs.q.device
            indices = torch.cat([torch.arange(a, b, device=device) for a, b in ranges])
            self.q, self.k, self.v, self.g = (t.index_select(1, indices) for t in sources)
            self.beta, self.out = inputs.beta.index_select(1, indices), torch.empty_like(self.q)
            self._indices = indices

    def store(self) -> None:
        """Put a packed copy's output in its place."""
        if self._indices is not None:
            self._inputs.out.index_copy_(1, self._indices, self.out)


def _whole_batch(inputs: KDAPrefillInputs, initial: torch.Tensor, final: torch.Tensor) -> Launch:
    return Launch(
        inputs.q.contiguous(),
        inputs.k.contiguous(),
        inputs.v.contiguous(),
        inputs.g.contiguous(),
        inputs.beta,
        inputs.out,
        inputs.A_log,
        inputs.dt_bias,
        inputs.scale,
        inputs.lower_bound,
        inputs.cu_seqlens.contiguous(),
        initial,
        final,
        None,
        None,
    )
