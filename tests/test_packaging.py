"""The wheel and the source distribution hold the whole package and nothing beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKS = ("tools", "sessions")


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_tree(target: Path) -> Path:
    """Copy what a clone has, links as links."""
    target.mkdir()
    for name in ("dlite_agent", *LINKS, "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, target / name)
    return target


def package_files() -> set[str]:
    """Return the paths of all files of the package, those behind the links included."""
    found = set()
    for folder, names, files in os.walk(ROOT / "dlite_agent", followlinks=True):
        names[:] = [name for name in names if name != "__pycache__"]
        found |= {str((Path(folder) / file).relative_to(ROOT)) for file in files}
    return found


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source distribution, and the wheel from it."""
    base = tmp_path_factory.mktemp("packaging")
    source = copy_tree(base / "source")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", base / "dist", source, cwd=base)
    return base / "dist"


def wheel_names(folder: Path) -> set[str]:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_links_are_relative_and_lead_to_the_packages() -> None:
    for name in LINKS:
        assert os.readlink(ROOT / "dlite_agent" / name) == f"../{name}"


def test_the_wheel_holds_every_file_and_no_top_level_tools_or_sessions(distributions: Path) -> None:
    names = {name for name in wheel_names(distributions) if ".dist-info/" not in name}
    assert names == package_files()
    assert {name.split("/")[0] for name in names} == {"dlite_agent"}


def test_the_wheel_carries_licence_and_command(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert b"dlite-agent = dlite_agent.cli:main" in archive.read(f"{info}/entry_points.txt")
        assert b"License-Expression: Apache-2.0" in archive.read(f"{info}/METADATA")


def test_the_source_distribution_holds_every_file(distributions: Path) -> None:
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    moved = {name.removeprefix("dlite_agent/") if name.split("/")[1] in LINKS else name for name in package_files()}
    assert moved | {"pyproject.toml", "README.md", "LICENSE"} <= names


def test_a_tree_that_has_lost_its_links_builds_the_same_wheel(distributions: Path, tmp_path: Path) -> None:
    source = copy_tree(tmp_path / "source")
    for name in LINKS:
        (source / "dlite_agent" / name).unlink()
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path / "dist", source, cwd=tmp_path)
    assert wheel_names(tmp_path / "dist") == wheel_names(distributions)


def test_the_wheel_is_imported_from_a_clean_environment(distributions: Path, tmp_path: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    environment = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    # The dependencies are borrowed; a path file met this way is not read, so the editable install stays out.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    run(*pip, "--ignore-installed", wheel, cwd=tmp_path)
    packages = sorted(
        {str(Path(name).parent).replace("/", ".") for name in package_files() if name.endswith("__init__.py")}
    )
    assert {"dlite_agent.tools", "dlite_agent.sessions"} <= set(packages)
    script = f"import importlib\nfor name in {packages}: print(importlib.import_module(name).__file__)"
    for file in run(python, "-I", "-c", script, cwd=tmp_path).splitlines():
        assert Path(file).is_relative_to(site)
    assert not (site / "tools").exists()
    assert not (site / "sessions").exists()
    assert (environment / "bin" / "dlite-agent").exists()
