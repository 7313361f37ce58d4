# SPDX-License-Identifier: Apache-2.0
"""A short conversation with branches, served for real: what each follow-up finds in the prefix cache.

The layout is GLM-5.3-Flash's (512-token blocks, 8,192 tokens a step); the model is the toy one, so that
every answer can be compared with the same prompt computed without a cache.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

# The platform first: see there.
import vllm_kda_prefill.planning_platform  # noqa: F401  # isort: skip

from vllm.v1.core.state_retention import Policy
from vllm_kda_prefill.planning import Arm, Engine, Layout
from vllm_kda_prefill.spans import QuerySpan, query_span, retained_states
from vllm_kda_prefill.toymodel.model import ModelSizes, ToyModel
from vllm_kda_prefill.toymodel.sampler import Greedy
from vllm_kda_prefill.toymodel.server import Server
from vllm_kda_prefill.toymodel.worker import ToyWorker

ANSWER_TOKENS = 6
PROMPT_TOKENS = 8192
TOLERANCE = 1e-9
"""Largest relative difference to an uncached run that counts as equal (fp64)."""


@dataclass(frozen=True)
class Turn:
    """One request of the conversation.

    Attributes:
        name: What the user does.
        keeps: Leading tokens of the first turn's text (prompt and answer) that the request starts with.
        adds: New tokens behind them.
    """

    name: str
    keeps: int
    adds: int


TURNS = (
    Turn("first prompt", 0, PROMPT_TOKENS),
    Turn("leaves at 7,900", 7900, 292),
    Turn("leaves at 7,400", 7400, 792),
    Turn("leaves at 6,500", 6500, 1692),
    Turn("leaves at 5,000", 5000, 3192),
    Turn("same again", PROMPT_TOKENS, 0),
    Turn("goes on", PROMPT_TOKENS + ANSWER_TOKENS, 700),
)


@dataclass(frozen=True)
class TurnRecord:
    """How one arm served a turn.

    Attributes:
        turn: The turn.
        prompt: Tokens of its prompt.
        cached: Prompt tokens found in the prefix cache.
        spans: The prompt's queries, one a pass.
        retained: States of the prompt in the prefix cache afterwards.
        seconds: Wall time of the turn on this machine.
        difference: Relative difference of the answer's logits to an uncached run; infinite until compared.
    """

    turn: Turn
    prompt: int
    cached: int
    spans: tuple[QuerySpan, ...]
    retained: tuple[int, ...]
    seconds: float
    difference: float = math.inf

    @property
    def passes(self) -> int:
        return len(self.spans)

    def as_json(self) -> dict[str, Any]:
        return {
            "turn": self.turn.name,
            "prompt": self.prompt,
            "cached": self.cached,
            "passes": self.passes,
            "spans": [
                {"start": span.start, "end": span.end, "checkpoints": list(span.checkpoints)} for span in self.spans
            ],
            "retained": list(self.retained),
            "difference": self.difference,
        }


class Conversation:
    """Serves the turns on a stock and on a coalesced engine, each with a cache of its own.

    Attributes:
        records: Arm -> what was served so far.
    """

    def __init__(
        self, layout: Layout | None = None, policy: Policy = "ladder", turns: tuple[Turn, ...] = TURNS
    ) -> None:
        torch.set_num_threads(1)  # The model's matrices are too small to share.
        self.layout = layout or Layout(mtp=3, num_blocks=400)
        self.turns = turns
        self.model = ToyModel(ModelSizes(kda_layers=self.layout.mamba_groups))
        self.records: dict[Arm, list[TurnRecord]] = {"stock": [], "coalesced": []}
        self.servers = {
            arm: Server(Engine.build(self.layout, arm, policy), self.layout, self.model, Greedy(), ToyWorker)
            for arm in self.records
        }
        self._random = random.Random(0)
        self._first_text: list[int] = []

    @property
    def steps(self) -> int:
        """How many results `play` yields."""
        return 2 * len(self.turns)

    def play(self) -> Iterator[tuple[Arm, TurnRecord]]:
        """Serve turn after turn, both arms and then the uncached run that both must equal."""
        for index, turn in enumerate(self.turns):
            added = [self._random.randrange(self.model.sizes.vocabulary) for _ in range(turn.adds)]
            prompt = self._first_text[: turn.keeps] + added
            request_id = f"turn-{index}"
            answers = {}
            for arm, server in self.servers.items():
                record, answers[arm] = self._serve(server, turn, request_id, prompt)
                self.records[arm].append(record)
            # Greedy answers: each arm's uncached run must continue that arm's own text.
            for arm, server in self.servers.items():
                difference = self._difference(server, request_id, prompt, answers[arm])
                self.records[arm][-1] = replace(self.records[arm][-1], difference=difference)
                yield arm, self.records[arm][-1]
            if not self._first_text:
                self._first_text = prompt + answers["stock"]

    @staticmethod
    def is_equal(*records: TurnRecord) -> bool:
        """Whether answers equal their uncached runs."""
        return all(record.difference < TOLERANCE for record in records)

    @property
    def largest_difference(self) -> float:
        """Over all answers of both arms."""
        return max(record.difference for records in self.records.values() for record in records)

    @property
    def all_equal(self) -> bool:
        return all(self.is_equal(*records) for records in self.records.values())

    def as_json(self) -> dict[str, Any]:
        """What was served: a list of turns for each arm, and the verdict."""
        arms: dict[str, Any] = {arm: [record.as_json() for record in records] for arm, records in self.records.items()}
        return {**arms, "largest_difference": self.largest_difference, "all_equal": self.all_equal}

    def _serve(
        self, server: Server[ToyWorker], turn: Turn, request_id: str, prompt: list[int]
    ) -> tuple[TurnRecord, list[int]]:
        began = time.monotonic()
        request = server.engine.add(request_id, prompt, max_tokens=ANSWER_TOKENS)
        spans = []
        while not request.is_finished():
            output = server.schedule()
            span = query_span(server.engine, output, request_id)
            assert span is not None, "a lone request was not scheduled"
            if span.start < len(prompt):
                spans.append(span)
            server.run_oldest()
        record = TurnRecord(
            turn=turn,
            prompt=len(prompt),
            cached=spans[0].start,
            spans=tuple(spans),
            retained=retained_states(server.engine, request),
            seconds=time.monotonic() - began,
        )
        return record, list(request.output_token_ids)

    def _difference(self, server: Server[ToyWorker], request_id: str, prompt: list[int], answer: list[int]) -> float:
        first = len(prompt)
        served = torch.stack([server.logits[request_id, first + i] for i in range(len(answer))])
        expected = self.model.uncached(prompt + answer, range(first - 1, first - 1 + len(answer)))
        return relative_difference(served, expected)


def relative_difference(values: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of `expected`; infinite where a value is not a number."""
    difference = float((values - expected).norm() / expected.norm())
    return math.inf if math.isnan(difference) else difference
