# SPDX-License-Identifier: Apache-2.0
"""Launcher over the FlashKDA extension that stock vLLM ships."""

from __future__ import annotations

import torch

from .base import WorkspaceSpec
from .segmented import Launch, Launcher


class FlashKDALauncher(Launcher):
    """`torch.ops._flashkda_C.fwd`: SM90, SM10x and SM12x, steps of 16 tokens."""

    name = "flashkda"

    def __init__(self, *, num_heads: int, max_num_tokens: int, max_num_seqs: int) -> None:
        if not hasattr(torch.ops._flashkda_C, "fwd"):
            import vllm._flashkda_C  # type: ignore[import-not-found]  # noqa: F401
        size = torch.ops._flashkda_C.get_workspace_size(max_num_tokens, num_heads, max_num_seqs)
        self._specs: tuple[WorkspaceSpec, ...] = (((int(size),), torch.uint8),)

    def workspace_specs(self) -> tuple[WorkspaceSpec, ...]:
        return self._specs

    def __call__(self, launch: Launch, workspace: tuple[torch.Tensor, ...]) -> None:
        # The extension wants checkpoint_offsets in the dtype of cu_seqlens; both are int32 here.
        torch.ops._flashkda_C.fwd(
            launch.q,
            launch.k,
            launch.v,
            launch.g,
            launch.beta,
            launch.scale,
            launch.out,
            workspace[0],
            launch.A_log,
            launch.dt_bias,
            launch.lower_bound,
            launch.initial,
            launch.final,
            launch.cu_seqlens,
            launch.checkpoint,
            launch.checkpoint_offsets,
        )
