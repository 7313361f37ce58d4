"""Run one arm of an engine comparison in a process of its own and write what it answered.

Usage: run_arm.py JOB.json OUT.json. The job names engine arguments and steps; a step is one of

- `{"generate": [[token, ...], ...], "max_tokens": n, "logprobs": k}`: prompts sent at once
- `{"reset": true}`: empty the prefix cache
- `{"zero_state": position}`: zero every page that holds a state of `position` tokens (a planted fault)

The engine core runs in this process, so that a step can reach its pages.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def _answer(output: Any, seconds: float) -> dict[str, Any]:
    completion = output.outputs[0]
    logprobs = [
        {str(token): entry.logprob for token, entry in position.items()} for position in completion.logprobs or []
    ]
    return {
        "tokens": list(completion.token_ids),
        "cached": output.num_cached_tokens,
        "logprobs": logprobs,
        "seconds": seconds,
    }


def _generate(llm: Any, step: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=step["max_tokens"], logprobs=step.get("logprobs"), ignore_eos=True
    )
    begin = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in step["generate"]], params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return [_answer(output, seconds) for output in outputs]


def _zero_state(llm: Any, position: int) -> int:
    core = llm.llm_engine.engine_core.engine_core
    pool = core.scheduler.kv_cache_manager.block_pool
    pages = [block.block_id for block in pool.blocks if block.block_hash_num_tokens == position]
    runner = core.model_executor.driver_worker.worker.model_runner
    layers = runner.vllm_config.compilation_config.static_forward_context
    for layer in layers.values():
        states = getattr(layer, "kv_cache", None)
        if isinstance(states, tuple):
            for state in states:
                state[pages] = 0
    return len(pages)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM

    begin = time.perf_counter()
    llm = LLM(**job["engine"])
    results: list[Any] = []
    started = time.perf_counter() - begin
    for step in job["steps"]:
        if "generate" in step:
            results.append(_generate(llm, step))
        elif "reset" in step:
            results.append(llm.reset_prefix_cache())
        else:
            results.append(_zero_state(llm, step["zero_state"]))
    core = llm.llm_engine.engine_core.engine_core
    stats = getattr(core.scheduler, "plan_stats", None)
    summary = {
        "start_seconds": started,
        "block_sizes": [m.block_size for m in core.scheduler.kv_cache_manager.coordinator.single_type_managers],
        "num_pages": core.scheduler.kv_cache_config.num_blocks,
        "spans": stats.spans if stats else None,
        "states": stats.states if stats else None,
        "fallbacks": dict(stats.fallbacks) if stats else None,
    }
    Path(sys.argv[2]).write_text(json.dumps({"results": results, "summary": summary}))


if __name__ == "__main__":
    main()
