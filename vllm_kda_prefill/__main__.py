# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_kda_prefill`: the `kda-prefill` command where it is not installed."""

from vllm_kda_prefill.cli import main

if __name__ == "__main__":
    main()
