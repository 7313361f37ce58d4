# SPDX-License-Identifier: Apache-2.0
"""One arm of an engine comparison, in a process of its own.

Usage: run_arm.py ENGINE.json RESULT_FD. Takes one JSON step a line on stdin and answers each with one JSON line on
the file descriptor. A step is one of

- `{"generate": [[token, ...], ...], "max_tokens": n, "logprobs": k}`: prompts sent at once
- `{"decode": [[token, ...], ...], "steps": n}`: prompts sent at once; when all decode, n steps are timed
- `{"reset": true}`: empty the prefix cache
- `{"zero_state": position}`: zero every cached recurrent state of `position` tokens (a planted fault), with `"rank": r`
  on that rank only; the answer is their number
- `{"summary": true}`: what the engine is and what its planner counted

The engine core runs in this process, so that a step can reach its blocks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

PARTS = (
    ("scheduler", "schedule"),
    ("scheduler", "update_from_output"),
    ("model_executor", "execute_model"),
    ("model_executor", "sample_tokens"),
)
"""Calls of the engine core that make up a step, next to waiting for the GPU."""


def _answer(output: Any, seconds: float) -> dict[str, Any]:
    completion = output.outputs[0]
    positions = completion.logprobs or []
    return {
        "tokens": list(completion.token_ids),
        "cached": output.num_cached_tokens,
        "logprobs": [{str(token): entry.logprob for token, entry in position.items()} for position in positions],
        "seconds": seconds,
    }


def _generate(llm: Any, step: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=step["max_tokens"], logprobs=step.get("logprobs"), ignore_eos=True
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in step["generate"]]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return [_answer(output, seconds) for output in outputs]


def _decode(llm: Any, step: dict[str, Any], parts: dict[str, float]) -> dict[str, Any]:
    """Milliseconds of every timed step, and what each of `parts` and the processors took of a step on average."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    steps = step["steps"]
    # Tokens that arrive before the timed steps, after the last prompt's first one, and in flight behind them.
    params = SamplingParams(temperature=0.0, max_tokens=steps + 64, ignore_eos=True)
    names = [f"decode-{number}" for number in range(len(step["decode"]))]
    for name, tokens in zip(names, step["decode"], strict=True):
        engine.add_request(name, {"prompt_token_ids": tokens}, params)
    produced = dict.fromkeys(names, 0)
    while min(produced.values()) < 4:
        for output in engine.step():
            produced[output.request_id] = len(output.outputs[0].token_ids)
    parts.update(dict.fromkeys(parts, 0.0))
    times, answered = [], 0
    cpu = time.process_time()
    for _ in range(steps):
        begin = time.perf_counter()
        answered += len(engine.step())
        times.append((time.perf_counter() - begin) * 1e3)
    cpu = time.process_time() - cpu
    means = {name: seconds * 1e3 / steps for name, seconds in parts.items()}
    engine.abort_request(names)
    while engine.engine_core.engine_core.batch_queue:  # Steps in flight, of requests that are gone.
        engine.step()
    return {"times": times, "full": answered == steps * len(names), "cpu": cpu * 1e3 / steps, **means}


def _timed(owner: Any, name: str, parts: dict[str, float]) -> None:
    """Add up in `parts` what calls of the owner's method take."""
    method = getattr(owner, name)
    parts[name] = 0.0

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            parts[name] += time.perf_counter() - begin

    setattr(owner, name, call)


def state_blocks(scheduler: Any, position: int) -> list[int]:
    """Cached blocks with a recurrent state of `position` tokens, without the attention blocks that end there.

    The scheduler is one with the gate on."""
    from vllm.v1.core.kv_cache_utils import get_group_id

    manager = scheduler.kv_cache_manager
    recurrent = set(manager.groups.mamba_ids)
    return [
        block.block_id
        for block in manager.block_pool.blocks
        if block.block_hash_num_tokens == position and get_group_id(block.block_hash) in recurrent
    ]


def _zero_state(core: Any, position: int, rank: int | None) -> int:
    def zero(worker: Any, block_ids: list[int]) -> None:
        if rank in (None, worker.rank):
            for layer in worker.model_runner.vllm_config.compilation_config.static_forward_context.values():
                states = getattr(layer, "kv_cache", None)
                if isinstance(states, tuple):
                    for state in states:
                        state[block_ids] = 0

    block_ids = state_blocks(core.scheduler, position)
    core.model_executor.collective_rpc(zero, args=(block_ids,))
    return len(block_ids)


def _summary(core: Any) -> dict[str, Any]:
    scheduler = core.scheduler
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    stats = getattr(scheduler, "plan_stats", None)
    return {
        "block_sizes": [manager.block_size for manager in managers],
        "num_blocks": scheduler.kv_cache_config.num_blocks,
        "counts": stats.totals() if stats else None,
    }


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engine = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM

    llm: Any = LLM(**engine)
    core = llm.llm_engine.engine_core.engine_core
    parts: dict[str, float] = {}
    for owner, name in PARTS:
        _timed(getattr(core, owner), name, parts)
    with os.fdopen(int(sys.argv[2]), "w") as results:
        for line in sys.stdin:
            step = json.loads(line)
            answer: Any
            if "generate" in step:
                answer = _generate(llm, step)
            elif "decode" in step:
                answer = _decode(llm, step, parts)
            elif "reset" in step:
                answer = llm.reset_prefix_cache()
            elif "zero_state" in step:
                answer = _zero_state(core, step["zero_state"], step.get("rank"))
            else:
                answer = _summary(core)
            results.write(json.dumps(answer) + "\n")
            results.flush()


if __name__ == "__main__":
    main()
