# SPDX-License-Identifier: Apache-2.0
"""How far two answers to the same prompt are apart."""

from __future__ import annotations

import math
import statistics
from typing import Any

Answer = dict[str, Any]

TOP = 20
LISTED = 1000
"""Logprobs to ask for: a wrong state puts one answer's likeliest tokens far down in the other's list."""


def difference(left: Answer, right: Answer) -> float:
    """Root mean square of the differences in logprob of either answer's 20 likeliest tokens, up to the first token
    that differs.

    The largest of them says little: where the model is unsure, one unlikely token of one position is far off in
    answers that differ by rounding alone, almost as far as in answers to two prompts. The mean is not.
    A token that one answer does not list counts with that answer's least likely one: it is at least so far away.
    """
    squares: list[float] = []
    for position, (a, b) in enumerate(zip(left["logprobs"], right["logprobs"], strict=True)):
        squares += (*_squares(a, b), *_squares(b, a))
        if left["tokens"][position] != right["tokens"][position]:
            break
    return math.sqrt(statistics.fmean(squares))


def _squares(reference: dict[str, float], other: dict[str, float]) -> list[float]:
    likeliest = sorted(reference, key=reference.__getitem__, reverse=True)[:TOP]
    least = min(other.values())
    return [(reference[token] - other.get(token, least)) ** 2 for token in likeliest]


def rounded(values: list[float]) -> list[float]:
    return [round(value, 3) for value in values]
