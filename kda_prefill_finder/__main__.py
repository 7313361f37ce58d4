# SPDX-License-Identifier: Apache-2.0
"""`python -m kda_prefill_finder --link SITE_DIR`: an editable install for hosts that cannot run pip."""

from __future__ import annotations

import argparse
from pathlib import Path

from kda_prefill_finder import CHECKOUT
from kda_prefill_finder.link import link


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kda_prefill_finder", description=__doc__)
    parser.add_argument(
        "--link",
        required=True,
        type=Path,
        metavar="SITE_DIR",
        help="site directory of the Python that runs vLLM, such as the first of site.getsitepackages()",
    )
    site_dir = parser.parse_args().link.resolve()
    link(Path(CHECKOUT), site_dir)
    # A Python that another checkout is installed in has loaded that one's finder, and links that one.
    print(f"linked {CHECKOUT} into {site_dir}")


if __name__ == "__main__":
    main()
