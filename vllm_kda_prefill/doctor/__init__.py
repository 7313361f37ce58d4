# SPDX-License-Identifier: Apache-2.0
"""`kda-prefill doctor`: whether a host can serve, before a server starts."""
