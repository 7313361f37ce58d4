"""One arm of an engine comparison, in a process of its own.

Usage: run_arm.py ENGINE.json RESULT_FD. Takes one JSON step a line on stdin and answers each with one JSON line on
the file descriptor. A step is one of

- `{"generate": [[token, ...], ...], "max_tokens": n, "logprobs": k}`: prompts sent at once
- `{"reset": true}`: empty the prefix cache
- `{"zero_state": position}`: zero every page that holds a state of `position` tokens (a planted fault)
- `{"summary": true}`: what the engine is and what its planner counted

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


def _zero_state(core: Any, position: int) -> int:
    pool = core.scheduler.kv_cache_manager.block_pool
    pages = [block.block_id for block in pool.blocks if block.block_hash_num_tokens == position]
    runner = core.model_executor.driver_worker.worker.model_runner
    for layer in runner.vllm_config.compilation_config.static_forward_context.values():
        states = getattr(layer, "kv_cache", None)
        if isinstance(states, tuple):
            for state in states:
                state[pages] = 0
    return len(pages)


def _summary(core: Any) -> dict[str, Any]:
    scheduler = core.scheduler
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    stats = getattr(scheduler, "plan_stats", None)
    return {
        "block_sizes": [manager.block_size for manager in managers],
        "num_pages": scheduler.kv_cache_config.num_blocks,
        "counts": stats.totals() if stats else None,
    }


def main() -> None:
    engine = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM

    llm: Any = LLM(**engine)
    core = llm.llm_engine.engine_core.engine_core
    with os.fdopen(int(sys.argv[2]), "w") as results:
        for line in sys.stdin:
            step = json.loads(line)
            answer: Any
            if "generate" in step:
                answer = _generate(llm, step)
            elif "reset" in step:
                answer = llm.reset_prefix_cache()
            elif "zero_state" in step:
                answer = _zero_state(core, step["zero_state"])
            else:
                answer = _summary(core)
            results.write(json.dumps(answer) + "\n")
            results.flush()


if __name__ == "__main__":
    main()
