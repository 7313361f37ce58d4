# SPDX-License-Identifier: Apache-2.0
"""Which parameters differ between the ranks of an engine with seeded weights."""

import torch
from torch import nn

from tests.engine.seeded_weights import parts_of_a_rank
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear


def layer(kind, tp_size=2, **parameters):
    """A layer of vLLM's that only holds its parameters."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.tp_size = tp_size
    for name, parameter in parameters.items():
        made.register_parameter(name, parameter)
    return made


def parameter():
    return nn.Parameter(torch.zeros(2, 2))


def test_parts_differ_and_wholes_are_alike_by_any_name():
    bias, shared = parameter(), layer(MergedColumnParallelLinear, weight=parameter())
    model = nn.Module()
    model.gate = layer(ReplicatedLinear, weight=parameter(), bias=bias)
    model.experts = layer(RoutedExperts, w13_weight=parameter(), e_score_correction_bias=bias)
    model.shared = shared
    model.shared_again = shared
    model.out = layer(RowParallelLinear, weight=parameter())
    model.latent = layer(MergedColumnParallelLinear, tp_size=1, weight=parameter())
    model.norm = nn.LayerNorm(2)
    model.linear_attention = nn.Module()
    model.linear_attention.A_log = parameter()
    parts = parts_of_a_rank(model)
    names = {name for name, value in model.state_dict(keep_vars=True).items() if id(value) in parts}
    assert names == {
        "experts.w13_weight",
        "shared.weight",
        "shared_again.weight",
        "out.weight",
        "linear_attention.A_log",
    }
