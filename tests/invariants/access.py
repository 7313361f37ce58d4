# SPDX-License-Identifier: Apache-2.0
"""Which rows of one step read and write which blocks: kernels run them in any order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class StepAccess:
    """Records reads and writes of a step, and raises where their order would matter.

    Attributes:
        readers: Block id -> requests whose queries start from the state in it.
        writers: Block id -> request that writes it.
    """

    def __init__(self) -> None:
        self.readers: dict[int, set[str]] = {}
        self.writers: dict[int, str] = {}

    def read(self, block_id: int, request_id: str) -> None:
        """A request's query starts from the state in a block."""
        self.readers.setdefault(block_id, set()).add(request_id)

    def write(self, block_id: int, request_id: str) -> None:
        """A request's query writes a block."""
        assert block_id, f"request {request_id} writes the null block"
        writer = self.writers.setdefault(block_id, request_id)
        assert writer == request_id, f"block {block_id} is written by requests {writer} and {request_id} in one step"

    def check(self) -> None:
        """No request overwrites the state that another one starts from."""
        for block_id, writer in self.writers.items():
            others = self.readers.get(block_id, set()) - {writer}
            assert not others, f"block {block_id}: requests {sorted(others)} read what {writer} overwrites in this step"


def check_copies(copies: Iterable[Any]) -> set[int]:
    """Copies of a step do not depend on their order; the blocks that they read or write."""
    copies = list(copies)
    targets, sources = {copy.dst_block_id for copy in copies}, {copy.src_block_id for copy in copies}
    assert len(targets) == len(copies), f"two copies have one target: {copies}"
    assert not targets & sources, f"copies depend on each other's order: {copies}"
    return targets | sources
