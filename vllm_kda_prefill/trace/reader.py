# SPDX-License-Identifier: Apache-2.0
"""Reads recorded prompts: Mooncake's lines, and agent sessions of one JSON file each.

A file that has anything wrong in it gives a `TraceError` and no prompt at all: a share of cached tokens over a part of
a trace would be believed.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_kda_prefill.trace.errors import TraceError
from vllm_kda_prefill.trace.prompts import PrefixTree, Prompt, Trace

MOONCAKE_BLOCK = 512
"""Tokens that one of Mooncake's hashes stands for."""

MAX_TOKENS = 2**24
"""A prompt of more tokens is a mistake: no model takes it, and the rest of the line would be wrong with it."""

Tokens = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
PromptTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class MooncakeLine(_Strict):
    """A line of a Mooncake trace: `timestamp` in milliseconds, lengths in tokens, an id a block of 512 tokens."""

    timestamp: Time
    input_length: PromptTokens
    output_length: Tokens
    hash_ids: list[int]


class SessionRequest(_Strict):
    """A request of an agent session: `t` in seconds, `in` and `out` in tokens."""

    t: Time
    tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS, alias="in")]
    output_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS, alias="out")]
    hash_ids: list[int]


class SessionHead(_Strict):
    """What an agent session says besides its requests.

    Attributes:
        block_size: Tokens that an id stands for.
        requests: At least one, each checked for itself, so that an error can say which it is in.
        hash_id_scope: Whether ids mean the same blocks in other files too.
    """

    block_size: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    requests: Annotated[list[Any], Field(min_length=1)]
    hash_id_scope: Literal["local", "global"] = "local"


def read_traces(paths: Sequence[Path]) -> Trace:
    """All prompts of the given files, by time; prompts of equal times in the order of the files.

    Hash ids of Mooncake files name the same blocks in all of them, those of a session in that session alone, unless it
    has `"hash_id_scope": "global"`.

    Raises:
        TraceError: A file cannot be read, or a line or request of it is not what it should be.
    """
    tree = PrefixTree()
    everywhere = tree.fresh()
    prompts = [prompt for path in paths for prompt in _read(path, tree, everywhere)]
    prompts.sort(key=lambda prompt: prompt.time)
    name = paths[0].name if len(paths) == 1 else f"{len(paths)} files"
    return Trace(name, prompts)


def _read(path: Path, tree: PrefixTree, everywhere: int) -> list[Prompt]:
    text = _text(path)
    if not text.strip():
        raise TraceError(f"{path}: it is empty; give recorded requests")
    if _is_session(path, text):
        return list(_session(path, text, tree, everywhere))
    return [_mooncake_prompt(path, number, line, tree, everywhere) for number, line in _lines(text)]


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content).decode()
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TraceError(f"{path}: cannot be read ({reason}); give a readable file, plain or .gz") from None
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        where = "" if content.startswith(b"\x1f\x8b") else f" line {line}:"
        raise TraceError(f"{path}:{where} it is not UTF-8; give a text of JSON") from None


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, from 1; empty ones are passed over."""
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def _is_session(path: Path, text: str) -> bool:
    """Whether a file is one JSON document of a session; Mooncake's lines are a document each."""
    first = text.lstrip().split("\n", 1)[0]
    try:
        document = json.loads(first)
    except (ValueError, RecursionError):
        # A session over several lines, or a bad line.
        return path.name.removesuffix(".gz").endswith(".json")
    return isinstance(document, dict) and ("requests" in document or "block_size" in document)


def _mooncake_prompt(path: Path, number: int, text: str, tree: PrefixTree, root: int) -> Prompt:
    where = f"{path}: line {number}"
    try:
        line = MooncakeLine.model_validate_json(text)
    except ValidationError as error:
        raise TraceError(f"{where}: {_reason(error)}") from None
    blocks = -(-line.input_length // MOONCAKE_BLOCK)
    if len(line.hash_ids) != blocks:
        raise TraceError(
            f"{where}: hash_ids has {len(line.hash_ids)} ids; input_length {line.input_length} in blocks of "
            f"{MOONCAKE_BLOCK} tokens needs {blocks}"
        )
    path_of_nodes = tree.walk(root, line.hash_ids)
    return Prompt(line.timestamp / 1000, line.input_length, line.output_length, MOONCAKE_BLOCK, path_of_nodes)


def _session(path: Path, text: str, tree: PrefixTree, everywhere: int) -> Iterator[Prompt]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise TraceError(f"{path}: line {line}: it is no JSON ({getattr(error, 'msg', error)})") from None
    try:
        head = SessionHead.model_validate(document)
    except ValidationError as error:
        raise TraceError(f"{path}: {_reason(error)}") from None
    root = everywhere if head.hash_id_scope == "global" else tree.fresh()
    for number, item in enumerate(head.requests, 1):
        where = f"{path}: request {number}"
        try:
            request = SessionRequest.model_validate(item)
        except ValidationError as error:
            raise TraceError(f"{where}: {_reason(error)}") from None
        yield _session_prompt(where, head.block_size, request, tree, root)


def _session_prompt(where: str, block_size: int, request: SessionRequest, tree: PrefixTree, root: int) -> Prompt:
    """A session may leave out the id of a last, shorter block: nothing else is known to share that block."""
    full, rest = divmod(request.tokens, block_size)
    ids = len(request.hash_ids)
    if ids not in {full, full + bool(rest)}:
        raise TraceError(
            f"{where}: hash_ids has {ids} ids; in {request.tokens} in blocks of {block_size} tokens needs "
            f"{full + bool(rest)}"
        )
    nodes = tree.walk(root, request.hash_ids)
    if ids == full and rest:
        nodes = (*nodes, tree.fresh())
    return Prompt(request.t, request.tokens, request.output_tokens, block_size, nodes)


def _reason(error: ValidationError) -> str:
    """The first thing that is wrong, in one line."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    message = " ".join(first["msg"].split())
    if first["type"] in {"missing", "json_invalid"} or isinstance(first["input"], dict | list):
        return f"{field}: {message}" if field else message
    value = repr(first["input"])
    value = value if len(value) <= 40 else f"{value[:37]}..."
    return f"{field} {value}: {message}" if field else f"{value}: {message}"
