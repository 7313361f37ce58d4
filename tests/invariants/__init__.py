# SPDX-License-Identifier: Apache-2.0
"""What must hold of every step, and the workers' records that it is checked against.

| file | job |
|---|---|
| `pool.py` | reference counts, free lists, tiers, names, the allocator's block tables, leaks |
| `access.py` | which rows of a step write and read which blocks; copies |
| `fingerprints.py`, `prefixes.py` | which prefix each block holds |
| `contents.py` | what the prefix cache promises is what its blocks hold; the worker's block tables |
| `checked_worker.py` | the toy model's worker, whose every read and write is checked |

The worker of labels (`tests/v1/core/shadow_worker.py`) is fed to the checks of `pool.py` and `access.py` too. It runs
no model and no metadata builder, so thousands of its steps take seconds.
"""

import vllm_kda_prefill.planning_platform  # noqa: F401  # Before the rest of vLLM.
