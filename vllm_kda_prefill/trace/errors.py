# SPDX-License-Identifier: Apache-2.0
"""What a user can do wrong with a trace."""


class TraceError(Exception):
    """A trace, or a setting of its replay, that cannot be used; the message is one line and names the value."""
