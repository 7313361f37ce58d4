# SPDX-License-Identifier: Apache-2.0
"""Serving measurements: clients, arms, suites, records and the report. What measures needs httpx and numpy only."""
