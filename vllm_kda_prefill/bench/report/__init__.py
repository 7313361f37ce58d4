# SPDX-License-Identifier: Apache-2.0
"""Runs to one self-contained HTML page, its plots as PNGs, and the tables in Markdown."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import jinja2

from vllm_kda_prefill.bench import records, summary
from vllm_kda_prefill.bench.errors import BenchError
from vllm_kda_prefill.bench.records import Record
from vllm_kda_prefill.bench.report.plots import draw
from vllm_kda_prefill.bench.scheduler import sections as scheduler_only
from vllm_kda_prefill.bench.summary import Section

TEMPLATES = Path(__file__).parent


def render(folder: Path, output: Path) -> list[Path]:
    """Read every .jsonl file of `folder` and write report.html, report.md and the plots to `output`.

    Returns:
        What was written.

    Raises:
        BenchError: There is nothing to report, or nowhere to write.
    """
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise BenchError(f"{folder}: no .jsonl file in it; name the folder that kda-prefill bench wrote to")
    try:
        output.mkdir(parents=True, exist_ok=True)
        runs = [_run(path, output) for path in files]
        written = [path for run in runs for path in run["plots"]]
        for template in ("report.html", "report.md"):
            target = output / template
            target.write_text(_environment().get_template(template + ".j2").render(runs=runs))
            written.append(target)
    except OSError as error:
        raise BenchError(f"--output {output}: {error.strerror}; name a folder you can write to") from None
    return written


def _run(path: Path, output: Path) -> dict[str, Any]:
    """What the templates say of one run."""
    found = list(records.read(path))
    if not found or found[0]["kind"] != "run":
        raise BenchError(f"{path}: its first line names no run; remove the file from the folder")
    head = found[0]
    plots = draw(found, path.stem, output)
    return {
        "name": path.stem,
        "head": head,
        "conditions": _conditions(head, found),
        "failures": [record["error"] for record in found if record["kind"] in ("failure", "left out")],
        "sections": sections(found),
        "plots": plots,
        "images": [(plot.name, base64.b64encode(plot.read_bytes()).decode()) for plot in plots],
    }


def sections(found: list[Record]) -> list[Section]:
    """Every table of a run."""
    return [*summary.sections(found), *scheduler_only.sections(found)]


def _conditions(head: Record, found: list[Record]) -> list[tuple[str, str]]:
    configuration = head["configuration"]
    packages = ", ".join(f"{name} {version}" for name, version in head["packages"].items())
    activation = [
        f"{record['arm']}: {record['spans']:.0f} spans, {record['exported']:.0f} states"
        for record in found
        if record["kind"] == "activation" and record["when"] == "before"
    ]
    said = [
        ("date", head["date"]),
        ("GPU", head["gpu"] or "none"),
        ("machine", head["machine"]),
        ("versions", f"Python {head['python']}, {packages}"),
        ("commit", head["commit"] or "unknown"),
        ("command", " ".join(head["command"])),
        ("server", configuration.get("server_version", "")),
        ("counted before timing", "; ".join(activation)),
    ]
    return [(name, text) for name, text in said if text]


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=lambda name: "html" in (name or ""),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["cell"] = lambda text: str(text).replace("|", "\\|")
    return environment
