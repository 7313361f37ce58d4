# SPDX-License-Identifier: Apache-2.0
"""Paths as options: what cannot be read or written is refused before anything is started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from vllm_kda_prefill.console import check


def read_path(text: str) -> Path:
    """A path of at least one character: an empty one would be the working folder.

    Raises:
        typer.BadParameter: It is empty.
    """
    if not text:
        raise typer.BadParameter("'' is no path; name one, or leave the option out")
    return Path(text)


ModelFolder = Annotated[
    Path | None,
    typer.Option(
        parser=read_path, metavar="PATH", help="Folder of a config.json; default the shapes of GLM-5.3-Flash."
    ),
]


def check_output(path: Path, option: str = "--output", is_folder: bool = False) -> None:
    """End the command unless a file, or a folder, can be written; folders that are missing get made later."""
    kind = "folder" if is_folder else "file in a folder"
    check(option, path, path.is_dir() == is_folder or not path.exists(), f"name a {'folder' if is_folder else 'file'}")
    nearest = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    is_good = os.access(nearest, os.W_OK) and (nearest.is_dir() or nearest == path.absolute())
    check(option, path, is_good, f"name a {kind} that you can write to")


def check_plot(plot: Path) -> None:
    """The picture must be one that can be drawn, at a place that can be written to."""
    folder = plot.absolute().parent
    check("--plot", plot, plot.suffix in (".png", ".svg", ".pdf"), "name a .png, .svg or .pdf file")
    check("--plot", plot, folder.is_dir(), "make its folder first")
    check("--plot", plot, os.access(folder, os.W_OK), "choose a folder you can write to")
    check("--plot", plot, not plot.is_dir(), "it is a folder; name a file")
    check("--plot", plot, not plot.exists() or os.access(plot, os.W_OK), "the file cannot be written over")
