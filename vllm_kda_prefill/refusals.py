# SPDX-License-Identifier: Apache-2.0
"""One line for what vLLM says of values that it refuses: its message, behind the option that it is about."""

from __future__ import annotations

from collections.abc import Mapping

WORDS = {
    "--kv-cache-dtype": ("kv_cache_dtype",),
    "--max-model-len": ("max_model_len",),
    "--dcp": ("decode context parallel", "decode_context_parallel"),
    "--tp": ("tensor parallel", "tensor_parallel"),
}
"""Option -> how vLLM's messages name it."""


def plain(error: Exception) -> str:
    """The message of an error as one line, without what pydantic puts around it."""
    from pydantic import ValidationError

    found = error.errors() if isinstance(error, ValidationError) else ()
    text = "; ".join(each["msg"].removeprefix("Value error, ") for each in found) or str(error)
    return " ".join(text.split()).rstrip(".") or type(error).__name__


def refusal(error: Exception, given: Mapping[str, object]) -> str:
    """The message of an error, with the option that it is about and its value.

    Args:
        error: What was raised on these values.
        given: Option -> value; None where it was left out.
    """
    text = plain(error)
    if text.startswith("--"):
        return text
    for option, words in WORDS.items():
        if given.get(option) is not None and any(word in text for word in words):
            return f"{option} {given[option]}: vLLM refuses it: {text}"
    return f"vLLM refuses this layout: {text}"
