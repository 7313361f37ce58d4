# SPDX-License-Identifier: Apache-2.0
"""Made-up traces of several kinds, written as Mooncake's lines; the same seed gives the same trace.

A prompt is a list of texts. A text has an identity and a length, and equal beginnings of prompts get equal ids.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm_kda_prefill.trace.errors import TraceError
from vllm_kda_prefill.trace.reader import MOONCAKE_BLOCK

Text = tuple[int, int]
"""A text's identity, and its tokens."""

RENDERED_ANEW = 104_640
"""Tokens that kinds `rerender` and `rerender-long` render anew in every turn."""


@dataclass
class Writing:
    """Hands out texts and block ids.

    Attributes:
        random: The trace's only source of chance.
    """

    random: random.Random
    _texts: int = 0
    _ids: dict[tuple[int, tuple[tuple[int, int, int], ...]], int] = field(default_factory=dict)

    def text(self, tokens: int) -> Text:
        """A text that there was not before."""
        self._texts += 1
        return self._texts, tokens

    def any_text(self, shortest: int, longest: int) -> Text:
        """A new text of a random length."""
        return self.text(self.random.randint(shortest, longest))

    def block_ids(self, texts: Sequence[Text]) -> list[int]:
        """An id a block of the prompt, equal to another prompt's where both are equal up to the block's end."""
        ids: list[int] = []
        block: list[tuple[int, int, int]] = []
        room = MOONCAKE_BLOCK
        for identity, tokens in texts:
            begin = 0
            while begin < tokens:
                end = min(begin + room, tokens)
                block.append((identity, begin, end))
                room -= end - begin
                begin = end
                if not room:
                    ids.append(self._id(ids, block))
                    block, room = [], MOONCAKE_BLOCK
        return [*ids, self._id(ids, block)] if block else ids

    def _id(self, before: list[int], block: list[tuple[int, int, int]]) -> int:
        return self._ids.setdefault((before[-1] if before else -1, tuple(block)), len(self._ids))


@dataclass(frozen=True)
class Made:
    """A request: seconds, and the texts of its prompt."""

    seconds: float
    texts: tuple[Text, ...]

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.texts)


def _agents(writing: Writing) -> Iterator[Made]:
    """Eight agents at a time work up to prompts of 100,000 tokens and more, then another takes over.

    A turn adds a tool's answer. One turn in eight drops what the last turns thought, and so renders them again.
    """
    tools = writing.text(6_000)
    agents: list[list[Text]] = [[] for _ in range(8)]
    seconds = 0.0
    while True:
        agent = writing.random.choice(agents)
        if not agent or sum(tokens for _, tokens in agent) > 110_000:
            agent[:] = [tools, writing.any_text(500, 4_000)]
        elif len(agent) > 6 and writing.random.random() < 1 / 8:
            agent[-3:] = [writing.text(int(0.7 * tokens) + 1) for _, tokens in agent[-3:]]
        agent.append(writing.any_text(300, 9_000))
        seconds += writing.random.expovariate(1 / 2)
        yield Made(seconds, tuple(agent))


def _mix(writing: Writing) -> Iterator[Made]:
    """Chats that go on or part, questions about a few documents, and prompts that nobody repeats."""
    system = writing.text(1_500)
    documents = [writing.any_text(4_000, 60_000) for _ in range(40)]
    chats: list[tuple[Text, ...]] = []
    seconds = 0.0
    while True:
        chance = writing.random.random()
        if chance < 0.2:
            texts: tuple[Text, ...] = (writing.any_text(500, 30_000),)
        elif chance < 0.45:
            # Some documents are asked about much more often than others.
            document = documents[min(int(writing.random.expovariate(1 / 6)), len(documents) - 1)]
            texts = (system, document, writing.any_text(20, 600))
        else:
            chat = writing.random.choice(chats[-60:]) if chats and writing.random.random() < 0.8 else (system,)
            if len(chat) > 2 and writing.random.random() < 0.2:
                chat = chat[: writing.random.randrange(2, len(chat))]
            texts = (*chat, writing.any_text(50, 3_000))
            chats.append(texts)
        seconds += writing.random.expovariate(1 / 0.5)
        yield Made(seconds, texts)


def _uniform(writing: Writing) -> Iterator[Made]:
    """Prompts of 1 to 32,768 tokens that share nothing: there is nothing to find."""
    seconds = 0.0
    while True:
        seconds += 0.5
        yield Made(seconds, (writing.any_text(1, 32_768),))


def _scan(writing: Writing) -> Iterator[Made]:
    """Twenty prompts that come again and again, with questions; between two rounds sixty prompts come that never do."""
    hot = [writing.text(16_384) for _ in range(20)]
    seconds = 0.0
    while True:
        for text in hot:
            seconds += 0.5
            yield Made(seconds, (text, writing.any_text(20, 400)))
        for _ in range(60):
            seconds += 0.5
            yield Made(seconds, (writing.any_text(8_192, 32_768),))


def _repeat(writing: Writing) -> Iterator[Made]:
    """One prompt of 12,000 tokens every ten seconds: 1,440 requests are four hours."""
    prompt = writing.text(12_000)
    turn = 0
    while True:
        yield Made(10.0 * turn, (prompt,))
        turn += 1


def _rerendered(writing: Writing, stable: Sequence[int], whole: Sequence[int]) -> Iterator[Made]:
    """Turns that begin with `stable` tokens of one history and render the rest of `whole` tokens anew; when they are
    through, another agent does the same."""
    seconds = 0.0
    while True:
        history: list[Text] = []
        for kept, tokens in zip(stable, whole, strict=True):
            more = kept - sum(length for _, length in history)
            history += [writing.text(more)] if more > 0 else []
            seconds += 5
            yield Made(seconds, (*history, writing.text(tokens - kept)))


def _ten_turns() -> list[int]:
    return [20_000 + round(turn * 130_000 / 9) for turn in range(10)]


def _rerender(writing: Writing) -> Iterator[Made]:
    """Ten turns of 20,000 to 150,000 tokens, of which the last 104,640, or all there are, are rendered anew."""
    return _rerendered(writing, [max(tokens - RENDERED_ANEW, 0) for tokens in _ten_turns()], _ten_turns())


def _rerender_long(writing: Writing) -> Iterator[Made]:
    """Ten turns of a history of 20,000 to 150,000 tokens, each with 104,640 tokens behind it that are rendered anew."""
    return _rerendered(writing, _ten_turns(), [tokens + RENDERED_ANEW for tokens in _ten_turns()])


KINDS: dict[str, tuple[Callable[[Writing], Iterator[Made]], int]] = {
    "agents": (_agents, 1_000),
    "mix": (_mix, 4_000),
    "uniform": (_uniform, 1_000),
    "scan": (_scan, 1_600),
    "repeat": (_repeat, 1_440),
    "rerender": (_rerender, 10),
    "rerender-long": (_rerender_long, 10),
}
"""Name -> what makes its requests, without end, and how many of them a trace has if nothing is said."""


def make_lines(kind: str, requests: int | None = None, seed: int = 1) -> Iterator[str]:
    """The lines of a made-up trace.

    Args:
        kind: Of `KINDS`.
        requests: How many lines; None for the kind's own number.
        seed: Of all that is random.
    """
    make, usual = KINDS[kind]
    writing = Writing(random.Random(seed))
    for _, made in zip(range(usual if requests is None else requests), make(writing), strict=False):
        line = {
            "timestamp": round(made.seconds * 1000),
            "input_length": made.tokens,
            "output_length": 1,
            "hash_ids": writing.block_ids(made.texts),
        }
        yield json.dumps(line) + "\n"


def write_trace(path: Path, kind: str, requests: int | None = None, seed: int = 1) -> None:
    """Write a made-up trace, compressed where the name ends in `.gz`.

    Raises:
        TraceError: The file cannot be written.
    """
    text = "".join(make_lines(kind, requests, seed)).encode()
    try:
        path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written ({error.strerror}); name a file in a folder of yours") from None
