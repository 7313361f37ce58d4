# SPDX-License-Identifier: Apache-2.0
"""A vLLM load format, `seeded`, whose random weights have the scale of trained ones.

vLLM's own dummy weights are so small that logits hardly depend on the prompt, so a wrong state would not
show. Here a parameter's values depend on its name and shape alone, and where it is a rank's part of a larger
one on the rank: two engines of as many ranks hold the same model.
"""

from __future__ import annotations

import os
import zlib

import torch
from torch import nn

from vllm.config import ModelConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader


def _fill(name: str, parameter: torch.Tensor, rank: int) -> None:
    seed = f"{name}@{rank}" if rank else name
    generator = torch.Generator(device=parameter.device).manual_seed(zlib.crc32(seed.encode()))
    shape = parameter.shape

    def normal(scale: float) -> torch.Tensor:
        values = torch.empty(shape, dtype=torch.float32, device=parameter.device)
        return values.normal_(0.0, scale, generator=generator)

    # A token's log decay is -5 * sigmoid(exp(A_log) * (gate + dt_bias)). Trained layers remember thousands of
    # tokens; with gates around 0 a state would be forgotten within a few, and a wrong one would not show.
    if "A_log" in name:
        values = normal(0.1)
    elif "dt_bias" in name:
        values = normal(1.5) - 10.0
    elif "conv1d" in name:
        values = normal(0.5)
    elif parameter.ndim >= 2:
        values = normal(shape[-1] ** -0.5)
    elif "norm" in name:
        values = 1.0 + normal(0.02)
    else:
        values = normal(0.02)
    parameter.copy_(values.to(parameter.dtype))


def register() -> None:
    """Entry point of the `vllm.general_plugins` group; may run any number of times."""
    if os.environ.get("KDA_ONE_GPU_RANKS"):
        from tests.engine import one_gpu

        one_gpu.install()
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as loaders

    if "seeded" not in loaders:
        register_model_loader("seeded")(SeededModelLoader)


class SeededModelLoader(DummyModelLoader):
    """Fills every floating-point parameter in place of loading it."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        rank = get_tensor_model_parallel_rank()
        parts = parts_of_a_rank(model)
        with torch.no_grad():
            for name, parameter in model.state_dict(keep_vars=True).items():
                if parameter.is_floating_point() and parameter.numel():
                    _fill(name, parameter, rank if id(parameter) in parts else 0)


def parts_of_a_rank(model: nn.Module) -> set[int]:
    """Ids of the parameters that are a rank's own part of a larger one.

    Ranks must hold different parts, or a mix-up of two ranks' data would not show; what is not in parts must be equal
    on all. A parameter may have several names: the experts hold the router's bias as well. (In KDA's joint projection
    two small matrices that ranks have in common get different values too; what they make stays on the rank.)
    """
    parts: set[int] = set()
    whole: set[int] = set()
    for module in model.modules():
        own = {name: id(parameter) for name, parameter in module.named_parameters(recurse=False)}
        if isinstance(module, ReplicatedLinear):
            whole.update(own.values())
        elif isinstance(module, RoutedExperts):
            parts.update(own.values())
        elif isinstance(module, LinearBase | VocabParallelEmbedding):
            parts.update(own.values() if int(module.tp_size) > 1 else ())
        else:
            parts.update(own[name] for name in ("A_log", "dt_bias") if name in own)  # A value a head.
    return parts - whole
