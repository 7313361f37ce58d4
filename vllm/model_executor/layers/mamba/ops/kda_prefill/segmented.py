"""KDA prefill with four checkpoints over a kernel that returns one checkpoint and the final state.

A row with checkpoints ``o1 < o2 < o3 < o4`` is cut at ``o2`` and ``o4``: the first launch exports ``o1`` and
ends at ``o2``, the second exports ``o3`` and ends at ``o4``, the last runs to the row's end. Chunks never
straddle a cut, because offsets are whole chunks; what a cut costs in precision is how the kernel rounds the
state it hands out. FlashKDA hands out bf16 values and goes on with a finer state itself, so behind a cut the
output can differ from one launch in the last bf16 bit wherever the gates let the old state live on. It is
the difference that ending the query there would make.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from .base import HEAD_DIM, CheckpointTargets, KDAPrefill, KDAPrefillInputs, WorkspaceSpec
from .state_io import gather_states, scatter_states


@dataclass(frozen=True)
class Launch:
    """One kernel launch over ``n`` packed rows.

    ``q``, ``k``, ``v``, ``g``, ``out`` are contiguous bf16 ``[1, t, H, 128]``, ``beta`` ``[1, t, H]``,
    ``cu_seqlens`` int32 ``[n + 1]``. ``initial``, ``final`` and ``checkpoint`` are contiguous fp32
    ``[n, H, 128, 128]``; row ``i`` stores its state after ``checkpoint_offsets[i]`` tokens (int32, 0 = none).
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
        """Fill ``out``, ``final`` and ``checkpoint`` on the current stream."""


@dataclass(frozen=True)
class Segment:
    """Tokens ``[begin, end)`` of a row, relative to the row; entries of the ``[N, 4]`` tables or -1.

    ``checkpoint`` is the table entry exported inside the segment, ``final`` the one its end belongs to
    (-1: the row's own slot).
    """

    row: int
    begin: int
    end: int
    offset: int
    checkpoint: int
    final: int


def plan_segments(offsets: Sequence[Sequence[int]], query_lens: Sequence[int]) -> list[list[Segment]]:
    """Split every row into segments; launch ``i`` runs the ``i``-th segment of each row that has one."""
    launches: list[list[Segment]] = []
    for row, (row_offsets, length) in enumerate(zip(offsets, query_lens, strict=True)):
        active = sorted((offset, entry) for entry, offset in enumerate(row_offsets) if offset)
        begin = number = 0
        while begin < length or number == 0:
            inner = active[2 * number] if 2 * number < len(active) else None
            cut = active[2 * number + 1] if 2 * number + 1 < len(active) else None
            end = cut[0] if cut else length
            if len(launches) == number:
                launches.append([])
            launches[number].append(
                Segment(
                    row=row,
                    begin=begin,
                    end=end,
                    offset=inner[0] - begin if inner else 0,
                    checkpoint=inner[1] if inner else -1,
                    final=cut[1] if cut else -1,
                )
            )
            begin, number = end, number + 1
    return launches


class SegmentedKDAPrefill(KDAPrefill):
    """Up to three launches of a one-checkpoint kernel; rows without a plan run in the first.

    ``max_num_tokens`` and ``max_num_seqs`` bound one batch; they size the workspace.
    """

    def __init__(self, launcher: Launcher, *, num_heads: int, max_num_tokens: int, max_num_seqs: int) -> None:
        self.name = launcher.name
        self._launcher = launcher
        self._num_heads = num_heads
        self._max_num_tokens = max_num_tokens
        self._max_num_seqs = max_num_seqs

    def workspace_specs(self) -> tuple[WorkspaceSpec, ...]:
        states = (self._max_num_seqs, self._num_heads, HEAD_DIM, HEAD_DIM)
        # Two buffers alternate as initial and final state of consecutive launches; the third holds
        # checkpoints.
        return ((states, torch.float32),) * 3 + self._launcher.workspace_specs()

    def warm_up(self, state_pool: torch.Tensor) -> None:
        slot = torch.zeros(1, dtype=torch.int32, device=state_pool.device)
        state = torch.zeros_like(state_pool[:1], memory_format=torch.contiguous_format)
        gather_states(state_pool, slot, slot.bool(), state)
        scatter_states(state_pool, slot, state)

    def validate(self, inputs: KDAPrefillInputs, targets: CheckpointTargets | None = None) -> None:
        super().validate(inputs, targets)
        if inputs.num_rows > self._max_num_seqs or inputs.q.shape[1] > self._max_num_tokens:
            raise ValueError(
                f"batch of {inputs.num_rows} rows and {inputs.q.shape[1]} tokens; the workspace holds "
                f"{self._max_num_seqs} and {self._max_num_tokens}"
            )

    def _launch(
        self,
        inputs: KDAPrefillInputs,
        targets: CheckpointTargets | None,
        workspace: tuple[torch.Tensor, ...],
    ) -> None:
        if inputs.num_rows == 0:
            return
        buffers, scratch = workspace[:3], workspace[3:]
        initial = buffers[0][: inputs.num_rows]
        gather_states(inputs.state_pool, inputs.state_indices, inputs.has_initial_state, initial)
        if targets is None or not targets.any_active:
            final = buffers[1][: inputs.num_rows]
            self._launcher(_whole_batch(inputs, initial, final), scratch)
            scatter_states(inputs.state_pool, inputs.state_indices, final)
            return
        _run_segments(inputs, targets, self._launcher, buffers, scratch)


def _run_segments(
    inputs: KDAPrefillInputs,
    targets: CheckpointTargets,
    launcher: Launcher,
    buffers: tuple[torch.Tensor, ...],
    scratch: tuple[torch.Tensor, ...],
) -> None:
    launches = plan_segments(targets.host_offsets, targets.query_lens)
    starts = [0]
    for length in targets.query_lens:
        starts.append(starts[-1] + length)
    device = inputs.q.device
    # The null slot stands behind the tables for segments that export nothing inside.
    slot_table = torch.cat([targets.slots.flatten(), inputs.state_indices, targets.slots.new_zeros(1)])
    tables = _upload([_launch_tables(segments, inputs.num_rows) for segments in launches], slot_table)
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


_SLOT_TABLES = ("checkpoint", "final")


def _launch_tables(segments: list[Segment], num_rows: int) -> dict[str, list[int]]:
    """Host tables of one launch; slots as indices into the flattened slot table."""
    cu_seqlens = [0]
    for segment in segments:
        cu_seqlens.append(cu_seqlens[-1] + segment.end - segment.begin)
    own = 4 * num_rows
    null = own + num_rows
    return {
        "cu_seqlens": cu_seqlens,
        "offsets": [segment.offset for segment in segments],
        "checkpoint": [4 * s.row + s.checkpoint if s.checkpoint >= 0 else null for s in segments],
        "final": [4 * s.row + s.final if s.final >= 0 else own + s.row for s in segments],
    }


def _upload(tables: list[dict[str, list[int]]], slot_table: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Send all launches' tables in one copy and look all slots up at once; vectors at 16-byte boundaries."""
    flat: list[int] = []
    places: list[dict[str, slice]] = [{} for _ in tables]
    slots_end = 0
    for names in (_SLOT_TABLES, ("cu_seqlens", "offsets")):
        for place, table in zip(places, tables, strict=True):
            for name in names:
                place[name] = slice(len(flat), len(flat) + len(table[name]))
                flat += table[name]
                flat += [0] * (-len(flat) % 4)
        slots_end = slots_end or len(flat)
    host = torch.tensor(flat, dtype=torch.int32, pin_memory=slot_table.is_cuda)
    packed = host.to(slot_table.device, non_blocking=True)
    slots = slot_table.index_select(0, packed[:slots_end])
    return [
        {name: (slots if name in _SLOT_TABLES else packed)[part] for name, part in place.items()} for place in places
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
