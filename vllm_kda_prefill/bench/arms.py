# SPDX-License-Identifier: Apache-2.0
"""The ways to serve the same model that are compared, each a stock `vllm serve` with settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from vllm_kda_prefill.bench.errors import BenchError

# As in `vllm.kda_prefill_variables`, which only a process that has seconds to start vLLM can import. A test compares.
GATE = "VLLM_B12X_KDA_PREFILL_COALESCING"
RETENTION = "VLLM_B12X_KDA_PREFILL_RETENTION"
LOG_LIMIT = "VLLM_B12X_KDA_PREFILL_COALESCING_LOG_LIMIT"
SPLIT = ("VLLM_GLM53_SPLIT_TARGET_BLOCK_SIZE", "VLLM_GLM53_SPLIT_MAMBA_BLOCK_SIZE")
SCHEDULERS = "vllm_kda_prefill.bench.stopping_scheduler"
LOGGED_PLANS = 24
"""Few enough to be used up by warm-ups and probes: logging takes no time from a timed request."""


@dataclass(frozen=True)
class Arm:
    """One way to serve.

    Attributes:
        name: What records call it; `NAME#2` is a second server of arm `NAME`.
        coalesces: Whether the gate is on.
        environment: Variables on top of the runner's own.
        arguments: More arguments of `vllm serve`.
        equal_to: The arm whose states this one keeps by ending queries, or empty.
    """

    name: str
    coalesces: bool
    environment: Mapping[str, str]
    arguments: tuple[str, ...] = ()
    equal_to: str = ""


KINDS: dict[str, str] = {
    "stock": "the gate off",
    "ladder": "the gate on, policy ladder",
    "replay": "the gate on, policy replay",
    "equal": "the gate off; queries end where ladder keeps a state, as few as stock's scheduler can",
}


def arm_of(server: str) -> str:
    """The arm that a server of that name is one of."""
    return server.partition("#")[0]


def servers_of(arm: Arm, count: int) -> list[Arm]:
    """An arm as `count` servers that differ in nothing but their names."""
    more = [f"#{number}" for number in range(2, count + 1)]
    return [arm, *(replace(arm, name=arm.name + at, equal_to=arm.equal_to and arm.equal_to + at) for at in more)]


def make_arm(text: str, block_tokens: int) -> Arm:
    """The arm of a name, or of `NAME@BLOCKS` for a KV cache of that many blocks.

    Args:
        text: As on the command line.
        block_tokens: Tokens of an attention and of a Mamba block; 0 leaves stock's.

    Raises:
        BenchError: There is no such arm.
    """
    kind, at, blocks = text.partition("@")
    if kind not in KINDS or (at and not (blocks.isascii() and blocks.isdigit() and int(blocks) > 0)):
        raise BenchError(f"--arms {text}: give some of {', '.join(KINDS)}, with @BLOCKS for a KV cache of that size")
    coalesces = kind in ("ladder", "replay")
    environment = {GATE: str(int(coalesces)), LOG_LIMIT: str(LOGGED_PLANS if coalesces else 0)}
    if coalesces:
        environment[RETENTION] = kind
    environment |= {name: str(block_tokens) for name in SPLIT if block_tokens}
    arguments: list[str] = ["--num-gpu-blocks-override", blocks] if at else []
    if kind == "equal":
        arguments += ["--scheduler-cls", f"{SCHEDULERS}.end_at_checkpoints"]
    return Arm(text, coalesces, environment, tuple(arguments), "ladder" + at + blocks if kind == "equal" else "")
