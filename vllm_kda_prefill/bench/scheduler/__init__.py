# SPDX-License-Identifier: Apache-2.0
"""What is measured on the real scheduler alone: no GPU, no server."""
