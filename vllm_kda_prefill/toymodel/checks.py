# SPDX-License-Identifier: Apache-2.0
"""What a request reads is its own prefix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_kda_prefill.toymodel.fingerprints import Fingerprints, extend
from vllm_kda_prefill.toymodel.requests import WorkerRequest


class WrongContentError(AssertionError):
    """A request is about to compute from a block that holds something else than its own prefix."""


def check_chain(request: WorkerRequest, group: int, tokens: Sequence[int], chain: Fingerprints) -> None:
    """The state that a query started from was the request's own.

    Args:
        request: Whose query it is.
        group: KV cache group of the state.
        tokens: Tokens of the query.
        chain: Prefix that the state after each of them stands for, int64 `[T]`.

    Raises:
        WrongContentError: It was not.
    """
    if not np.array_equal(chain, extend(int(request.prefixes[request.computed]), tokens)):
        raise WrongContentError(
            f"request {request.request_id} resumes at {request.computed} in KV cache group {group} "
            "from a block that holds another state"
        )


def check_context(request: WorkerRequest, held: Fingerprints, tokens: Sequence[int]) -> None:
    """The attention rows of a query's whole context are the request's own.

    Args:
        request: Whose query it is.
        held: Prefix that ends with each row's token, int64 `[N]`, the query's own at the end.
        tokens: Tokens of the query.

    Raises:
        WrongContentError: They are not.
    """
    chain = extend(int(request.prefixes[request.computed]), tokens)
    expected = np.concatenate([request.prefixes[1 : request.computed + 1], chain])
    wrong = np.flatnonzero(held != expected)
    if len(wrong):
        raise WrongContentError(
            f"request {request.request_id} attends to {len(wrong)} wrong rows, the first for token {wrong[0]}"
        )
