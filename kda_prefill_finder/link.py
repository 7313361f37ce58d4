"""The file that starts the finder, as an editable install and `--link` write it."""

from __future__ import annotations

from pathlib import Path


def pth_file(checkout: Path) -> tuple[str, str]:
    """Name and text of the `.pth` file that puts `checkout` on the path and installs its finder."""
    return "vllm_kda_prefill.pth", f"{checkout}\nimport kda_prefill_finder; kda_prefill_finder.install()\n"
