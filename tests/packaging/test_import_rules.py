# SPDX-License-Identifier: Apache-2.0
"""The fork adds modules to stock vLLM and never replaces one.

Most tests run in a Python of their own over a small stub of the stock package: importing vLLM takes
seconds and would tie them to what the fork holds today.
"""

from __future__ import annotations

import importlib.metadata
import runpy
import shutil
import subprocess
import sys
import textwrap
import tomllib
import zipfile
from pathlib import Path

import pytest

from kda_prefill_finder import CheckoutFinder

CHECKOUT = Path(__file__).resolve().parents[2]
OVERLAY = CHECKOUT / "vllm"
STOCK = Path(str(importlib.metadata.distribution("vllm").locate_file("vllm")))
# Installed by `pip install .` instead of from the checkout, the fork's files lie in the stock folders.
STOCK_FILES = {str(path) for path in importlib.metadata.files("vllm") or []}


def run_python(code: str, *path: Path, cwd: Path | None = None) -> str:
    """Output of `code` in a fresh Python with `path` first on sys.path and nothing else of the fork.

    The working directory is on sys.path where `cwd` is given, as it is for `python -c`.
    """
    lines = [
        "import sys",
        # An editable install has started its own finder; these tests bring theirs.
        "sys.meta_path = [f for f in sys.meta_path if type(f).__name__ != 'CheckoutFinder']",
        "sys.modules.pop('kda_prefill_finder', None)",
        f"sys.path[0:0] = {[str(entry) for entry in path]!r}",
        textwrap.dedent(code),
    ]
    command = [sys.executable, *([] if cwd else ["-P"]), "-c", "\n".join(lines)]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    """A site directory with a stub of the stock package."""
    return write(
        tmp_path / "site",
        {
            "vllm/__init__.py": "origin = 'stock'",
            "vllm/core/__init__.py": "origin = 'stock'",
            "vllm/core/shared.py": "origin = 'stock'",
        },
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the finder, new modules, and two files it must never answer with."""
    write(
        tmp_path / "checkout",
        {
            "vllm/core/shared.py": "origin = 'fork'",
            "vllm/core/added.py": "origin = 'fork'",
            "vllm/core/new/__init__.py": "from vllm.core.new.inner import origin",
            "vllm/core/new/inner.py": "origin = 'fork'",
            "other/added.py": "origin = 'fork'",
        },
    )
    ignored = shutil.ignore_patterns("__pycache__")
    finder = "kda_prefill_finder"
    shutil.copytree(CHECKOUT / finder, tmp_path / "checkout" / finder, ignore=ignored)
    shutil.copy(CHECKOUT / "pyproject.toml", tmp_path / "checkout")
    return tmp_path / "checkout"


INSTALL = "import kda_prefill_finder; kda_prefill_finder.install()\n"


def test_modules_the_stock_package_lacks_come_from_the_checkout(stock: Path, checkout: Path) -> None:
    code = "import vllm.core.added as m, vllm.core.new as p; print(m.origin, p.origin, m.__file__, *p.__path__)"
    core = checkout / "vllm" / "core"
    assert run_python(INSTALL + code, stock, checkout) == f"fork fork {core}/added.py {core}/new"


def test_modules_the_stock_package_has_stay_stock(stock: Path, checkout: Path) -> None:
    code = "import vllm, vllm.core.shared as m; print(vllm.origin, vllm.core.origin, m.origin)"
    # The checkout comes first on the path, as it does for `python -c` at the repository's root.
    assert run_python(INSTALL + code, checkout, stock) == "stock stock stock"


def test_without_the_finder_the_added_module_is_not_found(stock: Path, checkout: Path) -> None:
    with pytest.raises(AssertionError, match=r"No module named 'vllm\.core\.added'"):
        run_python("import vllm.core.added", stock, checkout)


@pytest.mark.parametrize("name", ["vllm.core.missing", "vllm.missing", "other.added.missing"])
def test_unknown_names_are_still_an_import_error(stock: Path, checkout: Path, name: str) -> None:
    with pytest.raises(AssertionError, match=f"ModuleNotFoundError: No module named '{name}'"):
        run_python(f"{INSTALL}import {name}", stock, checkout)


@pytest.mark.parametrize("name", ["vllm", "other", "other.added", "kda_prefill_finder", "core.added"])
def test_the_finder_answers_for_nothing_but_submodules_of_vllm(checkout: Path, name: str) -> None:
    write(checkout, {"vllm/__init__.py": "", "core/added.py": ""})
    finder = CheckoutFinder(str(checkout))
    assert finder.find_spec("vllm.core.added") is not None
    assert finder.find_spec(name) is None


def test_the_finder_is_asked_last_and_installed_once(checkout: Path) -> None:
    code = f"""
    before = list(sys.meta_path)
    {INSTALL.strip()}
    {INSTALL.strip()}
    print(sys.meta_path[:-1] == before, type(sys.meta_path[-1]).__name__)
    """
    assert run_python(code, checkout) == "True CheckoutFinder"


def test_starting_the_finder_imports_nothing_else(checkout: Path) -> None:
    code = f"""
    sys.modules.pop('__future__', None)
    before = set(sys.modules)
    {INSTALL.strip()}
    print(*sorted(set(sys.modules) - before))
    """
    assert run_python(code, checkout) == "kda_prefill_finder"


def test_forked_and_spawned_processes_use_a_linked_directory(stock: Path, checkout: Path, tmp_path: Path) -> None:
    # -S: without the packages of this Python, where another checkout's finder may be started already.
    command = [sys.executable, "-S", "-m", "kda_prefill_finder", "--link", str(stock)]
    subprocess.run(command, cwd=checkout, check=True, capture_output=True)
    write(
        tmp_path,
        {
            "job.py": """
import multiprocessing, os
def origin(_):
    import vllm.core.added
    return vllm.core.added.origin
if __name__ == "__main__":
    from importlib.metadata import entry_points
    print(*(e.value for e in entry_points(group="vllm.general_plugins") if "kda" in e.name))
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, *pool.map(origin, [0]))
"""
        },
    )
    # A virtual environment whose only packages are the linked directory: site reads its `.pth` there.
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (site_dir,) = venv.glob("lib/python*/site-packages")
    (site_dir / "stock.pth").write_text(f"import site; site.addsitedir({str(stock)!r})\n")
    out = subprocess.check_output([venv / "bin" / "python", tmp_path / "job.py"], text=True).split("\n")
    target = "vllm.plugins.kda_prefill_coalescing:register"
    assert out == [target, "fork fork", "spawn fork", ""]


def test_import_vllm_from_the_repository_root_is_stock() -> None:
    # find_spec, not import: it walks the same path and does not load torch.
    code = "import importlib.util; print(importlib.util.find_spec('vllm').origin)"
    assert run_python(code, cwd=CHECKOUT) == str(STOCK / "__init__.py")


def overlay_files() -> list[Path]:
    """The fork's files under `vllm/`, relative to the checkout."""
    files = (path for path in OVERLAY.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return [path.relative_to(CHECKOUT) for path in files]


def test_no_file_of_the_fork_has_the_path_of_a_stock_file() -> None:
    assert STOCK_FILES, "the installed vLLM lists no files"
    assert [str(path) for path in overlay_files() if str(path) in STOCK_FILES] == []


def test_every_folder_is_stocks_or_a_package_of_the_fork() -> None:
    """A folder without `__init__.py` must be stock's, one with it must not be: else it cannot be imported."""
    stock_folders = {str(parent) for name in STOCK_FILES for parent in Path(name).parents}
    wrong = {
        str(folder)
        for path in overlay_files()
        if path.suffix == ".py"
        for folder in list(path.parents)[:-1]
        if (CHECKOUT / folder / "__init__.py").exists() == (str(folder) in stock_folders)
    }
    assert wrong == set()


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What `pip install .` would put into site-packages."""
    # A copy: setuptools leaves a build folder, and a stale one would go into the wheel.
    source = tmp_path_factory.mktemp("source")
    tracked = ["pyproject.toml", "setup.py", "LICENSE", "README.md", "vllm", "vllm_kda_prefill", "csrc"]
    for name in filter(lambda name: (CHECKOUT / name).exists(), [*tracked, "kda_prefill_finder"]):
        copy = shutil.copytree if (CHECKOUT / name).is_dir() else shutil.copy
        copy(CHECKOUT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(source / "out"), str(source)], check=True)
    (wheel,) = (source / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_overwrites_no_stock_file(wheel_files: set[str]) -> None:
    assert wheel_files & STOCK_FILES == set()


def test_the_wheel_holds_overlay_cli_and_kernel_sources(wheel_files: set[str]) -> None:
    expected = {str(path) for path in overlay_files()}
    cli = CHECKOUT / "vllm_kda_prefill"
    expected |= {str(path.relative_to(CHECKOUT)) for path in cli.rglob("*.py")}
    kernels = CHECKOUT / "csrc" / "kda_prefill"
    installed = Path("vllm/model_executor/layers/mamba/ops/kda_prefill/csrc")
    for pattern in ("*.cu", "*.cuh", "*.h"):
        expected |= {str(installed / path.relative_to(kernels)) for path in kernels.rglob(pattern)}
    assert expected <= wheel_files
    top_level = {name.split("/")[0] for name in wheel_files if ".dist-info/" not in name}
    assert top_level <= {"vllm", "vllm_kda_prefill"}


def test_the_wheel_holds_the_kernel_where_there_is_a_compiler(wheel_files: set[str]) -> None:
    package = "vllm/model_executor/layers/mamba/ops/kda_prefill"
    has_compiler = runpy.run_path(str(CHECKOUT / package / "build.py"))["find_nvcc"]() is not None
    assert (f"{package}/libkda_prefill.so" in wheel_files) == has_compiler


def test_the_pinned_vllm_is_the_installed_one() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert f"vllm=={importlib.metadata.version('vllm')}" in project["dependencies"]
