"""How far two answers to the same prompt are apart."""

from __future__ import annotations

from typing import Any

Answer = dict[str, Any]

TOP = 20
LISTED = 1000
"""Logprobs to ask for: a wrong state puts one answer's likeliest tokens far down in the other's list."""


def difference(left: Answer, right: Answer) -> float:
    """Largest difference in logprob of either answer's 20 likeliest tokens, up to the first token that differs.

    A token that one answer does not list counts with that answer's least likely one: it is at least so far away.
    """
    worst = 0.0
    for position, (a, b) in enumerate(zip(left["logprobs"], right["logprobs"], strict=True)):
        worst = max(worst, _farthest(a, b), _farthest(b, a))
        if left["tokens"][position] != right["tokens"][position]:
            break
    return worst


def _farthest(reference: dict[str, float], other: dict[str, float]) -> float:
    likeliest = sorted(reference, key=reference.__getitem__, reverse=True)[:TOP]
    least = min(other.values())
    return max(abs(reference[token] - other.get(token, least)) for token in likeliest)


def rounded(values: list[float]) -> list[float]:
    return [round(value, 3) for value in values]
