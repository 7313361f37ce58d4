"""Hostile traffic on the real scheduler and the true model."""

import vllm_kda_prefill.planning_platform  # noqa: F401  # Before the rest of vLLM.
