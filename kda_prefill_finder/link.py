# SPDX-License-Identifier: Apache-2.0
"""What goes into a site directory so that Python and vLLM find a checkout."""

from __future__ import annotations

import tomllib
from pathlib import Path


def pth_file(checkout: Path) -> tuple[str, str]:
    """Name and text of the `.pth` file that puts `checkout` on the path and installs its finder."""
    return "vllm_kda_prefill.pth", f"{checkout}\nimport kda_prefill_finder; kda_prefill_finder.install()\n"


def link(checkout: Path, site_dir: Path) -> None:
    """Write what an editable install would, without pip, into `site_dir`.

    The metadata is the part that is read at run time: the name, the version and the entry points that vLLM
    loads its plugins from. The RECORD lets pip uninstall or replace it.
    """
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    dist_info = f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    sections = {"console_scripts": project["scripts"], **project["entry-points"]}
    pth_name, pth_text = pth_file(checkout)
    texts = {
        pth_name: pth_text,
        f"{dist_info}/METADATA": (f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"),
        f"{dist_info}/entry_points.txt": "\n".join(
            line
            for section, targets in sections.items()
            for line in (f"[{section}]", *(f"{name} = {target}" for name, target in targets.items()), "")
        ),
    }
    record = f"{dist_info}/RECORD"
    texts[record] = "".join(f"{name},,\n" for name in [*texts, record])

    (site_dir / dist_info).mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (site_dir / name).write_text(text)
