# SPDX-License-Identifier: Apache-2.0
"""Wall-clock time, shared out: what is short of it takes fewer samples instead of being cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator


class Budget:
    """Time until a deadline."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deadline = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds to the deadline, negative past it."""
        return self._deadline - self._clock()

    def share(self, part: float) -> Budget:
        """A budget of its own of `part` of what is left."""
        return Budget(max(self.left, 0.0) * part, self._clock)

    def rounds(self, most: int) -> Iterator[int]:
        """Numbers of the rounds to run: at least one, then while a round as long as the longest still fits."""
        longest = 0.0
        for number in range(most):
            if number and self.left < 1.15 * longest:
                return
            start = self._clock()
            yield number
            longest = max(longest, self._clock() - start)
