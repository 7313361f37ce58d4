# SPDX-License-Identifier: Apache-2.0
"""GLM-5.3-Flash whose KDA layers export up to four states of one query.

The layers are stock's, built by stock's model, and take on the subclass afterwards: their weights, shapes and
cache specs do not change, only what a prefill with checkpoints runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.kda_prefill_variables import GATE
from vllm.logger import init_logger
from vllm.model_executor.layers.dcp_topk_merge import merge
from vllm.model_executor.layers.mamba.checkpoint import MambaPrefillCheckpointMetadata
from vllm.model_executor.layers.mamba.ops.gather_initial_states import gather_initial_states
from vllm.model_executor.layers.mamba.ops.kda_prefill import (
    CheckpointTargets,
    KDAPrefill,
    KDAPrefillInputs,
    export_conv_history,
    select_kda_prefill,
)
from vllm.model_executor.layers.mamba.ops.kda_prefill.base import CHUNK, WorkspaceSpec
from vllm.model_executor.layers.mamba.ops.kda_prefill.segmented import SegmentedKDAPrefill
from vllm.models.glm5next.common.kda import Glm5NextLinearAttention
from vllm.models.glm5next.common.model import Glm5NextForCausalLM, Glm5NextForConditionalGeneration
from vllm.platforms import current_platform
from vllm.plugins.kda_prefill_coalescing.config_check import backend_choice
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.gdn_checkpoint import CheckpointedGDNBackend, PlannedCheckpointMetadata
from vllm.v1.worker.gpu.model_states.checkpointed_mamba_hybrid import CheckpointedMambaHybridModelState
from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

logger = init_logger(__name__)

STOCK_BACKENDS = ("auto", "flashkda", "triton")


class CoalescedLinearAttention(Glm5NextLinearAttention):
    """A KDA layer that writes every planned state of a prefill to its page."""

    kda_prefill: KDAPrefill

    @classmethod
    def adopt(cls, layer: Glm5NextLinearAttention, backend: str, vllm_config: VllmConfig) -> CoalescedLinearAttention:
        """Turn one of stock's layers into this class, in place.

        Raises:
            RuntimeError: `backend` cannot run on this GPU, or none can; the message says why.
        """
        scheduler_config = vllm_config.scheduler_config
        capability = current_platform.get_device_capability()
        provider = select_kda_prefill(
            backend,
            capability=(capability.major, capability.minor) if capability is not None else None,
            head_dim=layer.head_dim,
            dtype=cast(torch.dtype, vllm_config.model_config.dtype),
            lower_bound=layer.kda_lower_bound,
            max_num_tokens=scheduler_config.max_num_batched_tokens,
            max_num_seqs=scheduler_config.max_num_seqs,
            num_heads=layer.local_num_heads,
        )
        if provider is None:
            raise RuntimeError(
                f"KDA prefill backend {backend!r} exports no states; unset {GATE} or choose "
                'a backend that does, as in --additional-config \'{"kda_prefill_backend": "flashkda"}\''
            )
        layer.__class__ = cls
        adopted = cast(CoalescedLinearAttention, layer)
        adopted.kda_prefill = provider
        logger.info_once("KDA prefill coalescing: states are exported by the %s kernel", provider.name)
        return adopted

    def get_attn_backend(self) -> type[AttentionBackend]:
        # Stock refuses settings that its backend cannot keep, such as batch invariance; so does this one.
        super().get_attn_backend()
        return CheckpointedGDNBackend

    def _flashkda_prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor,
        cu_seqlens: torch.Tensor,
        out: torch.Tensor | None,
        checkpoint: MambaPrefillCheckpointMetadata | None = None,
        raw_qkv: torch.Tensor | None = None,
        conv_state: torch.Tensor | None = None,
        recurrent_state: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the provider, or stock's own call where that is the same kernel and nothing is exported.

        Returns:
            The output, and the final state of each row, which stock writes to the row's page once more.
        """
        if checkpoint is None and isinstance(self.kda_prefill, SegmentedKDAPrefill):
            return super()._flashkda_prefill(q, k, v, g, beta, initial_state, cu_seqlens, out)
        metadata = self._metadata()
        state_indices, has_initial_state = metadata.non_spec_state_indices_tensor, metadata.has_initial_state
        assert state_indices is not None
        assert has_initial_state is not None
        assert recurrent_state is not None
        *workspace, workspace_out = current_workspace_manager().get_simultaneous(*self._workspace_specs())
        if isinstance(self.kda_prefill, SegmentedKDAPrefill):
            # Its first buffer takes the states that rows start from: stock has just gathered them.
            workspace.insert(0, initial_state)
        if out is None:
            out = workspace_out[:, : q.shape[1]]
        inputs = KDAPrefillInputs(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            A_log=self.A_log.view(-1),
            dt_bias=self.dt_bias.view(-1, self.head_dim),
            scale=self.head_dim**-0.5,
            lower_bound=self.kda_lower_bound,
            cu_seqlens=cu_seqlens,
            state_pool=recurrent_state,
            state_indices=state_indices.contiguous(),
            has_initial_state=has_initial_state,
            out=out,
        )
        targets = _targets(checkpoint)
        self.kda_prefill.run(inputs, targets, tuple(workspace))
        if targets is not None:
            assert raw_qkv is not None
            assert conv_state is not None
            export_conv_history(raw_qkv, conv_state, cu_seqlens, targets, self.conv_size - 1)
        every_row = torch.ones_like(has_initial_state)
        return out, gather_initial_states(recurrent_state, state_indices, every_row)

    def _workspace_specs(self) -> tuple[WorkspaceSpec, ...]:
        """The provider's buffers, and the output of a step that also carries draft-verify rows."""
        assert self._flashkda_buffer_specs is not None
        specs = self.kda_prefill.workspace_specs()
        if isinstance(self.kda_prefill, SegmentedKDAPrefill):
            specs = specs[1:]
        return (*specs, self._flashkda_buffer_specs[-1])

    def reserve_workspace(self) -> None:
        """Grow the shared workspace now: it is locked before the first real prefill."""
        if is_workspace_manager_initialized():
            current_workspace_manager().get_simultaneous(*self._workspace_specs())

    def warm_up_export(self) -> None:
        """Compile now what the first export would compile while its request waits; nothing is written."""
        conv_state, recurrent_state = self.kv_cache
        self.kda_prefill.warm_up(recurrent_state)
        if not self._conv_state_dim_first:
            conv_state = conv_state.transpose(-1, -2)
        device = conv_state.device
        projected = torch.zeros(
            (CHUNK, self.in_proj_qkvbfg_a.output_size_per_partition), dtype=conv_state.dtype, device=device
        )
        export_conv_history(
            projected[:, : conv_state.shape[1]],
            conv_state,
            torch.zeros(2, dtype=torch.int32, device=device),
            CheckpointTargets.from_host([[]], [[]], [0], device),
            self.conv_size - 1,
        )

    def _metadata(self) -> GDNAttentionMetadata:
        attn_metadata = get_forward_context().attn_metadata
        assert isinstance(attn_metadata, dict)
        metadata = attn_metadata[self.prefix]
        assert isinstance(metadata, GDNAttentionMetadata)
        return metadata


def _targets(checkpoint: MambaPrefillCheckpointMetadata | None) -> CheckpointTargets | None:
    if checkpoint is None:
        return None
    assert isinstance(checkpoint, PlannedCheckpointMetadata)
    return CheckpointTargets(
        offsets=checkpoint.checkpoint_offsets,
        slots=checkpoint.state_indices,
        host_offsets=checkpoint.host_offsets,
        query_lens=checkpoint.host_query_lens,
        host_slots=checkpoint.host_slots,
    )


@contextmanager
def _stock_backend(vllm_config: VllmConfig) -> Iterator[None]:
    """Show stock's constructor a backend name that it knows, for as long as it runs."""
    additional: Any = vllm_config.additional_config
    if backend_choice(vllm_config) in STOCK_BACKENDS:
        yield
        return
    chosen = additional["kda_prefill_backend"]
    additional["kda_prefill_backend"] = "flashkda"
    try:
        yield
    finally:
        additional["kda_prefill_backend"] = chosen


class CoalescedGlm5NextForCausalLM(Glm5NextForCausalLM):
    """The text model with coalescing KDA layers, and indexers whose ranks merge any number of rows."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        merge.bind()
        with _stock_backend(vllm_config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        for module in self.model.modules():
            if isinstance(module, Glm5NextLinearAttention):
                CoalescedLinearAttention.adopt(module, backend_choice(vllm_config), vllm_config).reserve_workspace()

    @staticmethod
    def get_model_state_cls() -> type[CheckpointedMambaHybridModelState]:
        return CheckpointedMambaHybridModelState


class CoalescedGlm5NextForConditionalGeneration(Glm5NextForConditionalGeneration):
    """The multimodal model; its text model comes from the registry and so is the class above."""

    @staticmethod
    def get_model_state_cls() -> type[CheckpointedMambaHybridModelState]:
        return CheckpointedMambaHybridModelState
