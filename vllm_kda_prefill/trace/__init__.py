# SPDX-License-Identifier: Apache-2.0
"""Recorded prompts through vLLM's real scheduler and KV cache manager: `kda-prefill bench trace`."""
