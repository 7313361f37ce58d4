# SPDX-License-Identifier: Apache-2.0
"""What ends a measurement."""

from __future__ import annotations


class BenchError(Exception):
    """A measurement that cannot be made or believed; the message is one line with the value and a hint."""
