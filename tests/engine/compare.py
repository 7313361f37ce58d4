"""How far two answers to the same prompt are apart."""

from __future__ import annotations

from typing import Any

Answer = dict[str, Any]


def difference(left: Answer, right: Answer) -> float:
    """Largest difference of a logprob that both list, up to the first position whose token differs."""
    worst = 0.0
    for position, (a, b) in enumerate(zip(left["logprobs"], right["logprobs"], strict=True)):
        worst = max([worst, *(abs(a[token] - b[token]) for token in a.keys() & b.keys())])
        if left["tokens"][position] != right["tokens"][position]:
            break
    return worst


def overlap(left: Answer, right: Answer) -> float:
    """Share of the likeliest next tokens that both list.

    Two lists from unlike states have next to nothing in common, and then `difference` sees next to nothing.
    """
    a, b = left["logprobs"][0], right["logprobs"][0]
    return len(a.keys() & b.keys()) / max(len(a), len(b))


def rounded(values: list[float]) -> list[float]:
    return [round(value, 3) for value in values]
