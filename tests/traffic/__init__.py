# SPDX-License-Identifier: Apache-2.0
"""Hostile traffic on vLLM's real scheduler and the toy model.

| file | job |
|---|---|
| `machine.py` | what traffic does, and to which engines: Hypothesis state machines |
| `world.py` | one engine, driven and checked step by step |
| `tests/invariants/` | what must hold after every step |
| `scenes.py` | fixed traffic for what random traffic meets seldom |
| `suite.py` | how much of it `make test` runs |
| `soak.py`, `mutants.py` | random seeds for as long as wanted; planted faults that the suite must find |

Most machines work at a sixteenth of the real sizes: Mamba blocks of 32 tokens, steps of 64 to 1,024, prompts of
1,280 that conversations extend up to what the pool holds. `RealSizeTraffic` runs fewer engines at the real sizes.
"""

import vllm_kda_prefill.planning_platform  # noqa: F401  # Before the rest of vLLM.
