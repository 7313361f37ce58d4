# SPDX-License-Identifier: Apache-2.0
"""KDA prefill that exports up to four interior states of a row to a state pool.

`base` says what a provider promises, `checkpoints` where interior states go; `reference`, `segmented` and
`native` are the providers; `select` chooses one.
Of vLLM, only the limits of a plan (`vllm.v1.core.prefill_plan`) are imported at module import time.
"""

from .base import ExportingLayer, KDAPrefill, KDAPrefillInputs
from .checkpoints import CheckpointMetadata, Checkpoints
from .conv_history import export_conv_history
from .select import select_kda_prefill

__all__ = [
    "CheckpointMetadata",
    "Checkpoints",
    "ExportingLayer",
    "KDAPrefill",
    "KDAPrefillInputs",
    "export_conv_history",
    "select_kda_prefill",
]
