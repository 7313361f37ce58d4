# SPDX-License-Identifier: Apache-2.0
"""The small model itself: its two forms agree, and its outputs depend on everything before them."""

import pytest
import torch

from vllm.v1.core.prefill_plan import CHECKPOINT_ALIGNMENT
from vllm_kda_prefill.toymodel.kda import KDAInputs, KDALayer
from vllm_kda_prefill.toymodel.model import ModelSizes, ToyModel

SIZES = ModelSizes(kda_layers=2)


@pytest.fixture(scope="module")
def model() -> ToyModel:
    return ToyModel(SIZES)


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SIZES.vocabulary, (count,), generator=generator).tolist()


def layer_inputs(model: ToyModel, layer: KDALayer, count: int) -> KDAInputs:
    x = model.norm(model.embedding[torch.tensor(tokens(count))])
    raw = layer.raw(x)
    return layer.inputs(x, raw, raw.new_zeros(3, raw.shape[1]))


@pytest.mark.parametrize("count", [1, 15, 16, 17, 100, 512])
def test_chunked_form_equals_token_by_token(model, count):
    layer = model.kda[0]
    inputs = layer_inputs(model, layer, count)
    generator = torch.Generator().manual_seed(1)
    state = torch.randn(layer.initial_state().shape, generator=generator, dtype=torch.float64)
    out, states = layer.chunked(inputs, state)
    for token in range(count):
        expected, state = layer.step(inputs, token, state)
        torch.testing.assert_close(out[:, token], expected, rtol=1e-10, atol=1e-12)
        if (token + 1) % CHECKPOINT_ALIGNMENT == 0:
            torch.testing.assert_close(states[(token + 1) // CHECKPOINT_ALIGNMENT], state, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(states[-1], state, rtol=1e-10, atol=1e-12)


def test_chunked_form_continues_where_it_stopped(model):
    layer = model.kda[0]
    inputs = layer_inputs(model, layer, 100)

    def part(first, last):
        q, k, v, decay = (x[:, first:last] for x in (inputs.q, inputs.k, inputs.v, inputs.log_decay))
        return KDAInputs(q, k, v, decay, inputs.beta[:, first:last])

    whole, states = layer.chunked(inputs, layer.initial_state())
    head, head_states = layer.chunked(part(0, 37), layer.initial_state())
    tail, tail_states = layer.chunked(part(37, 100), head_states[-1])
    torch.testing.assert_close(torch.cat([head, tail], 1), whole, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(tail_states[-1], states[-1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("changed", [0, 1, 700, 1498])
def test_last_output_depends_on_every_token(model, changed):
    prompt = tokens(1500)
    other = list(prompt)
    other[changed] = (other[changed] + 1) % SIZES.vocabulary
    before, after = model.uncached(prompt, [1499]), model.uncached(other, [1499])
    assert ((before - after).norm() / before.norm()).item() > 1e-5


def test_equal_tokens_in_another_order_give_another_output(model):
    prompt = tokens(600)
    swapped = prompt[:100] + prompt[200:300] + prompt[100:200] + prompt[300:]
    before, after = model.uncached(prompt, [599]), model.uncached(swapped, [599])
    assert ((before - after).norm() / before.norm()).item() > 1e-5


def test_outputs_are_the_same_in_every_run():
    prompt = tokens(200)
    first, second = (ToyModel(SIZES).uncached(prompt, [50, 199]) for _ in range(2))
    assert torch.equal(first, second)
