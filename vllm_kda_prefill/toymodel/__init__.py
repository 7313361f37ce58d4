# SPDX-License-Identifier: Apache-2.0
"""A small toy KDA + attention model on the CPU, and a worker that serves it from scheduler outputs."""

import vllm_kda_prefill.planning_platform  # noqa: F401  # Before the rest of vLLM.
