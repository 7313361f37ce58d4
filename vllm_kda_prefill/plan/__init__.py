# SPDX-License-Identifier: Apache-2.0
"""What the real scheduler and KV cache manager do with one prompt, coalesced and stock."""
