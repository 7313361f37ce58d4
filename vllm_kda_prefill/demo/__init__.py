# SPDX-License-Identifier: Apache-2.0
"""A conversation with branches on the toy model, coalesced and stock, every answer checked."""
