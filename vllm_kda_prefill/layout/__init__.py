# SPDX-License-Identifier: Apache-2.0
"""`kda-prefill layout`: what block sizes cost, in stock's layout and in split ones."""
