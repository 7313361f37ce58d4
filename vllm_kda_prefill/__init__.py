"""Command line and demonstration of coalesced KDA prefill with retained checkpoints."""
