"""KDA prefill that exports up to four interior states of a row to pages of the state pool.

``base`` says what a provider promises; ``reference``, ``segmented`` and ``native`` keep it; ``select``
chooses one. Nothing here imports vLLM at module import time.
"""

from .base import CheckpointTargets, KDAPrefill, KDAPrefillInputs
from .conv_history import export_conv_history
from .select import select_kda_prefill

__all__ = [
    "CheckpointTargets",
    "KDAPrefill",
    "KDAPrefillInputs",
    "export_conv_history",
    "select_kda_prefill",
]
