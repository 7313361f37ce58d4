# SPDX-License-Identifier: Apache-2.0
"""Command line and demonstration of coalesced KDA prefill with retained checkpoints."""
