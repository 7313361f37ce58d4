# SPDX-License-Identifier: Apache-2.0
"""GLM-5.3-Flash whose KDA layers export up to four states of one query.

The model is stock's. Importing this module registers the layer below with vLLM in place of stock's KDA layer, so
stock's model builds it; weights, shapes and cache specs do not change, only what a prefill runs.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import torch

from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig
from vllm.kda_prefill_variables import GATE
from vllm.logger import init_logger
from vllm.model_executor.layers.dcp_topk_merge import merge
from vllm.model_executor.layers.mamba.checkpoint import MambaPrefillCheckpointMetadata
from vllm.model_executor.layers.mamba.ops.gather_initial_states import gather_initial_states
from vllm.model_executor.layers.mamba.ops.kda_prefill import (
    Checkpoints,
    KDAPrefill,
    KDAPrefillInputs,
    export_conv_history,
    select_kda_prefill,
)
from vllm.model_executor.layers.mamba.ops.kda_prefill.base import WorkspaceSpec
from vllm.model_executor.layers.mamba.ops.scatter_states import scatter_states
from vllm.models.glm5next.common.kda import Glm5NextLinearAttention
from vllm.models.glm5next.common.model import Glm5NextForCausalLM, Glm5NextForConditionalGeneration
from vllm.platforms import current_platform
from vllm.plugins.kda_prefill_coalescing.config_check import backend_choice
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.gdn_checkpoint import CheckpointedGDNBackend, PlannedCheckpointMetadata
from vllm.v1.core.prefill_plan import CHECKPOINT_ALIGNMENT
from vllm.v1.worker.gpu.model_states.checkpointed_mamba_hybrid import CheckpointedMambaHybridModelState
from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

logger = init_logger(__name__)

STOCK_BACKENDS = ("auto", "flashkda", "triton")
"""Values of `kda_prefill_backend` that stock's layer knows."""


@dataclass(frozen=True)
class PoolStates:
    """States that stay in the pool until somebody needs a copy.

    Attributes:
        pool: fp32 `[states, H, 128, 128]`.
        indices: int32 `[N]`, the state of each row.
        has_initial_state: bool `[N]`; a row without starts from zeros.
    """

    pool: torch.Tensor
    indices: torch.Tensor
    has_initial_state: torch.Tensor

    def gather(self) -> torch.Tensor:
        """A copy, fp32 `[N, H, 128, 128]`."""
        return gather_initial_states(self.pool, self.indices, self.has_initial_state)


def _store_final_states(pool: torch.Tensor, final: torch.Tensor | None, indices: torch.Tensor) -> None:
    """Stock's scatter, unless the prefill has written its final states to the pool (`final` is None)."""
    if final is not None:
        scatter_states(pool, final, indices)


def _with_names(function: Any, **names: Any) -> Any:
    """A stock function in which some module-level names mean something else; stock's own is not touched.

    The other names are those of the time of this call: what is rebound in stock's module later is not seen.
    """
    function = function.__wrapped__
    globals_ = {**function.__globals__, **names}
    return FunctionType(function.__code__, globals_, function.__name__, function.__defaults__, function.__closure__)


@Glm5NextLinearAttention.register_oot
class CoalescedLinearAttention(Glm5NextLinearAttention):
    """A KDA layer that writes every planned state of a prefill to its block.

    Raises:
        RuntimeError: The chosen backend cannot run on this GPU, or none can; the message says why.
    """

    kda_prefill: KDAPrefill

    # Stock gathers the states that rows start from before every prefill, and scatters final states behind it. Most
    # providers read and write the pool themselves: the copies are made in `_flashkda_prefill` where one is needed.
    _forward = eager_break_during_capture(
        _with_names(
            Glm5NextLinearAttention._forward, gather_initial_states=PoolStates, scatter_states=_store_final_states
        )
    )

    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(config, _as_stock_knows_it(vllm_config), prefix)
        self.kda_prefill = self._select(backend_choice(vllm_config), vllm_config)
        # The shared workspace is locked before the first real prefill.
        if is_workspace_manager_initialized():
            current_workspace_manager().get_simultaneous(*self._workspace_specs())

    def _select(self, backend: str, vllm_config: VllmConfig) -> KDAPrefill:
        capability = current_platform.get_device_capability()
        provider = select_kda_prefill(
            backend,
            capability=(capability.major, capability.minor) if capability is not None else None,
            head_dim=self.head_dim,
            dtype=cast(torch.dtype, vllm_config.model_config.dtype),
            lower_bound=self.kda_lower_bound,
            max_num_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
            num_heads=self.local_num_heads,
        )
        if provider is None:
            raise RuntimeError(
                f"KDA prefill backend {backend!r} exports no states; unset {GATE} or choose "
                'a backend that does, as in --additional-config \'{"kda_prefill_backend": "flashkda"}\''
            )
        logger.info_once("KDA prefill coalescing: states are exported by the %s kernel", provider.name)
        return provider

    def get_attn_backend(self) -> type[AttentionBackend]:
        # Stock refuses settings that its backend cannot keep, such as batch invariance; so does this one.
        super().get_attn_backend()
        return CheckpointedGDNBackend

    def _flashkda_prefill(  # type: ignore[override]  # `_forward` above passes `PoolStates`, and takes None back
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: PoolStates,
        cu_seqlens: torch.Tensor,
        out: torch.Tensor | None,
        checkpoint: MambaPrefillCheckpointMetadata | None = None,
        raw_qkv: torch.Tensor | None = None,
        conv_state: torch.Tensor | None = None,
        recurrent_state: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the provider, or stock's own call where that is the same kernel and nothing is exported.

        The name is stock's: `_forward` calls it for whichever provider there is.

        Returns:
            The output, and the final state of each row where it is still to be written to the pool.
        """
        if checkpoint is None and self.kda_prefill.defers_to_stock:
            return super()._flashkda_prefill(q, k, v, g, beta, initial_state.gather(), cu_seqlens, out)
        assert checkpoint is None or isinstance(checkpoint, PlannedCheckpointMetadata)
        *workspace, workspace_out = current_workspace_manager().get_simultaneous(*self._workspace_specs())
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
            state_pool=initial_state.pool,
            state_indices=initial_state.indices.contiguous(),
            has_initial_state=initial_state.has_initial_state,
            out=workspace_out[:, : q.shape[1]] if out is None else out,
        )
        self.kda_prefill.run(inputs, checkpoint, tuple(workspace))
        if checkpoint is not None:
            assert raw_qkv is not None
            assert conv_state is not None
            export_conv_history(raw_qkv, conv_state, cu_seqlens, checkpoint, self.conv_size - 1)
        return inputs.out, None

    def _workspace_specs(self) -> tuple[WorkspaceSpec, ...]:
        """The provider's buffers, and the output of a step that also carries draft-verify rows."""
        assert self._flashkda_buffer_specs is not None
        return (*self.kda_prefill.workspace_specs(), self._flashkda_buffer_specs[-1])

    def warm_up_export(self) -> None:
        """Compile now what the first export would compile while its request waits; nothing is written."""
        conv_state, recurrent_state = self.kv_cache
        self.kda_prefill.warm_up(recurrent_state)
        if not self._conv_state_dim_first:
            conv_state = conv_state.transpose(-1, -2)
        device = conv_state.device
        projected = torch.zeros(
            (CHECKPOINT_ALIGNMENT, self.in_proj_qkvbfg_a.output_size_per_partition),
            dtype=conv_state.dtype,
            device=device,
        )
        export_conv_history(
            projected[:, : conv_state.shape[1]],
            conv_state,
            torch.zeros(2, dtype=torch.int32, device=device),
            Checkpoints.from_host([[]], [[]], [0], device),
            self.conv_size - 1,
        )


def _as_stock_knows_it(vllm_config: VllmConfig) -> VllmConfig:
    """The configuration for stock's constructor: a copy that names one of its backends where ours is another."""
    if backend_choice(vllm_config) in STOCK_BACKENDS:
        return vllm_config
    shown = copy(vllm_config)
    additional = cast(dict[str, Any], vllm_config.additional_config)
    shown.additional_config = {**additional, "kda_prefill_backend": "flashkda"}
    return shown


class CoalescedGlm5NextForCausalLM(Glm5NextForCausalLM):
    """The text model. Its KDA layers are `CoalescedLinearAttention`; its indexers' ranks merge any number of rows."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        merge.bind()
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    @staticmethod
    def get_model_state_cls() -> type[CheckpointedMambaHybridModelState]:
        return CheckpointedMambaHybridModelState


class CoalescedGlm5NextForConditionalGeneration(Glm5NextForConditionalGeneration):
    """The multimodal model; its text model comes from the registry and so is the class above."""

    @staticmethod
    def get_model_state_cls() -> type[CheckpointedMambaHybridModelState]:
        return CheckpointedMambaHybridModelState
