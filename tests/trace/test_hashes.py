# SPDX-License-Identifier: Apache-2.0
"""Hashes made of ids are equal exactly where vLLM's own, made of the tokens, are."""

from __future__ import annotations

import random

import pytest

# The platform first: see there.
from vllm_kda_prefill.planning import prepare  # isort: skip

from tests.trace.by_hand import make_trace
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request
from vllm_kda_prefill.trace.hashes import block_hasher
from vllm_kda_prefill.trace.prompts import Prompt


def request(name: str, tokens: list[int], hasher) -> Request:
    return Request(name, tokens, SamplingParams(max_tokens=8), pooling_params=None, block_hasher=hasher)


def random_prompts(count: int, block: int) -> list[tuple[int, list[int]]]:
    """Prompts that part from each other at random blocks, of random lengths; an id always has the same length."""
    chance = random.Random(4)
    prompts: list[tuple[int, list[int]]] = []
    for number in range(count):
        kept = chance.choice(prompts)[1] if prompts and chance.random() < 0.8 else []
        kept = kept[: chance.randrange(len(kept) + 1)]
        blocks = len(kept) + chance.randint(1, 4)
        ids = kept + [1000 * number + index for index in range(len(kept), blocks)]
        prompts.append((block * blocks - chance.choice([0, 0, 1, 3, block // 2, block - 1]), ids))
    return prompts


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize(("block", "hash_block"), [(64, 64), (64, 128), (64, 32), (48, 64)])
def test_hashes_are_equal_where_those_of_tokens_are(block, hash_block, lookahead):
    prepare()
    stock = get_request_block_hasher(hash_block, sha256, lookahead)
    prompts = random_prompts(60, block)
    trace = make_trace(*prompts, block_size=block)
    of_tokens: dict[bytes, bytes] = {}
    of_ids: dict[bytes, bytes] = {}
    pairs = 0
    for number, ((length, ids), prompt) in enumerate(zip(prompts, trace.prompts, strict=True)):
        tokens = [block_id for block_id in ids for _ in range(block)][:length]
        ours = request(f"ours-{number}", tokens, block_hasher(prompt, number, hash_block, lookahead))
        theirs = request(f"theirs-{number}", tokens, stock)
        for _ in range(3):
            for one, other in zip(ours.block_hashes, theirs.block_hashes, strict=True):
                assert of_tokens.setdefault(one, other) == other
                assert of_ids.setdefault(other, one) == one
                pairs += 1
            # An answer of its own: no two requests share what follows.
            answer = [-1 - number] * (hash_block // 2)
            ours.append_output_token_ids(answer)
            theirs.append_output_token_ids(answer)
    assert 0 < len(of_tokens) < pairs


def test_a_prefix_is_never_named_beyond_the_prompt():
    prompt = Prompt(0, 1000, 1, 512, (1, 2))
    with pytest.raises(AssertionError, match="1000 tokens"):
        prompt.position(1000, lookahead=1)
