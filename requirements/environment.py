# SPDX-License-Identifier: Apache-2.0
"""Make `.venv`: the pinned stack from a cache shared by checkouts, and this checkout on top of it.

The stack (vLLM, torch and the test tools, some 9 GB) is one virtual environment per content of the lock
files, in $KDA_PREFILL_CACHE (default ~/.cache/vllm-kda-prefill). Nothing of a checkout is installed in it.
`.venv` is a thin environment of this checkout: it reads the stack's site-packages and holds the editable
install. What is up to date is left alone, so running this twice costs nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parent
VENV = CHECKOUT / ".venv"
LOCK_FILES = [HERE / "runtime.txt", HERE / "dev.txt"]
# A change in one of these needs a new editable install, not a new stack.
INSTALL_FILES = [CHECKOUT / "pyproject.toml", CHECKOUT / "setup.py", CHECKOUT / "LICENSE", Path(__file__)]


def main() -> None:
    cache = Path(os.environ.get("KDA_PREFILL_CACHE") or Path.home() / ".cache" / "vllm-kda-prefill").resolve()
    stack_key = digest(LOCK_FILES, sys.version, sys.base_prefix, platform.machine())
    stack = cache / f"env-cp{sys.version_info.major}{sys.version_info.minor}-{stack_key}"
    venv_key = digest(INSTALL_FILES, str(stack), str(VENV))
    stack_stamp, venv_stamp = stack / ".complete", VENV / ".complete"

    cache.mkdir(parents=True, exist_ok=True)
    with exclusive(cache / "lock"):
        if not stack_stamp.exists():
            with timed(f"installing the pinned stack into {stack}"):
                make_stack(stack)
                stack_stamp.touch()
        if not venv_stamp.exists() or venv_stamp.read_text() != venv_key:
            with timed(f"making {VENV} on {stack}"):
                make_venv(stack)
                venv_stamp.write_text(venv_key)


def digest(files: list[Path], *texts: str) -> str:
    parts = [path.read_bytes() for path in files] + [text.encode() for text in texts]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


def make_stack(stack: Path) -> None:
    """Install the lock files. A stack that was interrupted has no stamp and is made anew."""
    shutil.rmtree(stack, ignore_errors=True)
    run(sys.executable, "-m", "venv", stack)
    # The lock files are complete: nothing beside them may be drawn in.
    run(*pip(stack), "--no-deps", *(f"--requirement={path}" for path in LOCK_FILES))


def make_venv(stack: Path) -> None:
    """Make the thin environment: no packages of its own but the editable install."""
    shutil.rmtree(VENV, ignore_errors=True)
    run(sys.executable, "-m", "venv", "--without-pip", VENV)
    # addsitedir, not a plain path: packages of the stack have `.pth` files of their own.
    path_file = site_packages(VENV) / "stack.pth"
    path_file.write_text(f"import site; site.addsitedir({str(site_packages(stack))!r})\n")
    for script in sorted((stack / "bin").iterdir()):
        offer(script, VENV / "bin" / script.name)
    # pip and setuptools are the stack's, so this needs no network.
    run(*pip(VENV), "--no-deps", "--no-build-isolation", "--editable", CHECKOUT)


def offer(script: Path, target: Path) -> None:
    """Put a command of the stack into the thin environment.

    The stack's own scripts start the stack's Python, which knows no checkout.
    """
    if target.exists() or not script.is_file():
        return
    head = script.read_bytes()[:512]
    if head.startswith(b"#!") and b"python" in head:
        target.write_text(f'#!/bin/sh\nexec "{VENV}/bin/python" "{script}" "$@"\n')
        target.chmod(0o755)
    else:
        target.symlink_to(script)


def site_packages(environment: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return environment / "lib" / version / "site-packages"


def pip(environment: Path) -> tuple[str | Path, ...]:
    return environment / "bin" / "python", "-m", "pip", "install", "-qq", "--no-input"


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock between processes, so that two set-ups do not write one environment."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another set-up to end", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    print(what, flush=True)
    start = time.monotonic()
    yield
    print(f"done in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: set-up failed: {' '.join(map(str, error.cmd))}")
