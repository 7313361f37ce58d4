# SPDX-License-Identifier: Apache-2.0
"""Block hashes of recorded prompts for vLLM, made of nodes and not of tokens.

vLLM hashes every block of a prompt's tokens together with the hash of the block before, and with the tokens that a
lookahead covers. All that the KV cache does with a hash is to compare it, so any names serve that are equal where those
are: here a prefix's `Position`. A prompt of 128K tokens then costs its 256 blocks, not its tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request
from vllm_kda_prefill.trace.prompts import Position, Prompt

_OWN = 1 << 63
"""Set in the node of a hash that covers answered tokens: no two requests share those."""

BlockHasher = Callable[[Request], list[BlockHash]]


def block_hash(position: Position) -> BlockHash:
    """32 bytes, as vLLM's SHA-256."""
    node, tokens = position
    return BlockHash(node.to_bytes(16, "big") + tokens.to_bytes(16, "big"))


def block_hasher(prompt: Prompt, number: int, hash_block: int, lookahead: int) -> BlockHasher:
    """What a vLLM `Request` asks for the hashes that it does not have yet.

    Args:
        prompt: The request's prompt.
        number: The request's, for the blocks that nothing else shares.
        hash_block: Tokens of one hash.
        lookahead: Tokens after a block that its hash covers.
    """

    def hashes(request: Request) -> list[BlockHash]:
        known = len(request.block_hashes)
        wanted = max(request.num_tokens - lookahead, 0) // hash_block
        return [_hash((index + 1) * hash_block) for index in range(known, wanted)]

    def _hash(tokens: int) -> BlockHash:
        if tokens + lookahead <= prompt.tokens:
            return block_hash(prompt.position(tokens, lookahead))
        return block_hash((number | _OWN, tokens))

    return hashes
