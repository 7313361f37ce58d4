# SPDX-License-Identifier: Apache-2.0
"""What is measured; each suite drives any number of servers that take turns request by request."""
