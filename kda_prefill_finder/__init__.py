# SPDX-License-Identifier: Apache-2.0
"""Import this fork's `vllm.*` modules from a checkout, beside a stock vLLM.

The checkout's `vllm/` holds only the files the fork adds, so Python cannot find them through the stock
package's `__path__`. `install()` appends a finder to `sys.meta_path`. It is asked last, after every finder
that knows stock vLLM, so it can add a module and never replace one.

An editable install (`pip install -e .`) activates it in every process through a `.pth` file. A host that
cannot run pip has two other ways:

- `python -m kda_prefill_finder --link SITE_DIR`, run from the checkout, writes that `.pth` file and the
  package metadata (entry points) into a site directory, such as the first of `site.getsitepackages()`.
  Python reads `.pth` files in site directories only: a directory on PYTHONPATH is not one.
- With the checkout on PYTHONPATH, `import kda_prefill_finder; kda_prefill_finder.install()`. This reaches
  the calling process and the processes it forks, not those it spawns, and brings no entry points.

This module is loaded at every interpreter start, so it imports nothing that Python has not loaded already.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

CHECKOUT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class CheckoutFinder:
    """Finds `vllm.*` modules in one checkout. Equal finders look in the same checkout."""

    def __init__(self, checkout: str) -> None:
        self.checkout = checkout

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckoutFinder) and other.checkout == self.checkout

    def __hash__(self) -> int:
        return hash(self.checkout)

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Return the spec of a module or regular package that the checkout adds, else None."""
        if not fullname.startswith("vllm."):
            return None
        base = os.path.join(self.checkout, *fullname.split("."))
        package_file = os.path.join(base, "__init__.py")
        is_package = os.path.isfile(package_file)
        if not is_package and not os.path.isfile(base + ".py"):
            return None
        # Not at module level: importlib.util costs more than the rest of an interpreter's start-up hook.
        from importlib.util import spec_from_file_location

        return spec_from_file_location(
            fullname,
            package_file if is_package else base + ".py",
            submodule_search_locations=[base] if is_package else None,
        )


def install() -> None:
    """Append the finder of this checkout to `sys.meta_path`, once."""
    finder = CheckoutFinder(CHECKOUT)
    if finder not in sys.meta_path:
        sys.meta_path.append(finder)
