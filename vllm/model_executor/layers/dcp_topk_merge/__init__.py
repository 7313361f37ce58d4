# SPDX-License-Identifier: Apache-2.0
"""The best `k` rows of an index that context-parallel ranks share, from what each rank found in its own part.

A row is what the sparse indexer selects: a token, or a pool of `index_kpool` tokens. `merge.merge_dcp_topk` is what the
forward pass calls: pack, one all-gather, select. `_triton_kernels` holds the two kernels, `reference` says in plain
PyTorch what they compute. Nothing here imports vLLM at module import time.

The packed form of a candidate is one int64, so that one comparison settles score and tie:

    bits 63..32   the fp32 score as an int32 that orders alike: its bits, all but the sign inverted if it is negative
    bits 31..0    the row id, inverted: among equal scores the lower id is the larger number

    +inf > ... > 0.0 == -0.0 > ... > -inf > NaN of either sign > no candidate

A NaN is a candidate, the worst one: it is selected only where places are left. `UNUSED`, the smallest int64, is no
candidate. Its lower half is 0, the inverse of the id -1.

Invariants that callers keep (stock vLLM 0.33.0 does, on NVIDIA GPUs):

- A list holds different local ids in any order; unused places are -1, wherever they are.
- Local row `i` of rank `r` is row `(i // interleave * ranks + r) * interleave + i % interleave` of all.
- A list holds the best `k` of its rank. Which of several rows of equal score it holds, where they do not all fit, is
  the local selection's choice: the merge cannot bring back a row that no rank offers.
- All ranks call with the same number of queries, and with the same `k`.
"""

MAX_K = 2048
"""Rows that can be selected, at most."""

MAX_RANKS = 8
"""Ranks whose lists can be merged, at most."""

UNUSED = -(2**63)
"""The packed form of no candidate."""
