"""The wheel and the sdist, installed beside folders with the names of our packages."""

import json
import os
import re
import shutil
import socket
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.programs import ROOT, run_program

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = (
    "splitveil",
    "common",
    "protos",
    "deploy",
    "active_party",
    "passive_party",
    "experiments",
)
VERSION = PROJECT["project"]["version"]
COMMANDS = sorted(PROJECT["project"]["scripts"])
TAKEN = FOLDERS[1:]
"""Names that a folder of the user's, or another distribution, may have."""


class Installed:
    """An environment with the wheel and its dependencies, and nothing of the repository."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.here = folder / "here"
        self.bin = folder / "env" / "bin"
        run(sys.executable, "-m", "venv", "--without-pip", str(folder / "env"))
        python = str(self.bin / "python")
        run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", str(wheel))
        site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
        dependencies = sysconfig.get_path("purelib")
        (site / "dependencies.pth").write_text(dependencies)  # its own .pth files are not read
        for name in TAKEN:
            for parent in (site, self.here):
                (parent / name).mkdir(parents=True)
                (parent / name / "__init__.py").write_text(f"raise SystemExit('wrong {name}')")

    def run(self, *command: str) -> str:
        """Run an installed command beside folders that have our folders' names.

        Whatever it does has to work behind a proxy that answers nothing.
        """
        with dead_proxy() as settings:
            return run(str(self.bin / command[0]), *command[1:], cwd=self.here, **settings)


@contextmanager
def dead_proxy() -> Iterator[dict[str, str]]:
    with socket.socket() as holder:  # bound, and nobody listens
        holder.bind(("127.0.0.1", 0))
        proxy = f"http://127.0.0.1:{holder.getsockname()[1]}"
        yield {
            written: proxy
            for name in ("https_proxy", "http_proxy", "all_proxy", "grpc_proxy")
            for written in (name, name.upper())
        }


def run(*command: str, cwd: Path | None = None, **variables: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200", **variables}
    done = run_program(*command, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stdout
    return done.stdout.strip()


def build(kind: str, source: Path, output: Path) -> Path:
    """Build a wheel or an sdist with the backend that is installed: nothing is downloaded."""
    code = (
        "import sys; from setuptools import build_meta as backend; "
        "print(getattr(backend, sys.argv[1])(sys.argv[2]))"
    )
    output.mkdir(exist_ok=True)
    name = run(sys.executable, "-c", code, f"build_{kind}", str(output), cwd=source).splitlines()[
        -1
    ]
    return output / name


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what a package is made of: building leaves files behind."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info", "certificates", "results")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=skipped)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    return build("wheel", source, source / "built")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"), wheel)


def test_the_wheel_holds_every_file_of_ours_under_one_name(source: Path, wheel: Path) -> None:
    kept = {".py", ".pyi", ".yaml", ".proto", ".typed", ".css", ".html", ".js"}
    expected = {
        str(Path("" if folder == "splitveil" else "splitveil", path.relative_to(source)))
        for folder in FOLDERS
        for path in (source / folder).rglob("*")
        if path.is_file() and path.suffix in kept
    }
    assert len(expected) > 200
    assert expected <= names_in(wheel)
    assert {name.partition("/")[0] for name in names_in(wheel)} == {"splitveil"}


def test_the_sdist_makes_the_same_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", source, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("splitveil-*")
    assert (unpacked / "LICENSE").is_file()
    assert names_in(build("wheel", unpacked, tmp_path / "again")) == names_in(wheel)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_prints_its_version(installed: Installed, command: str) -> None:
    assert installed.run(command, "--version") == f"{command} {VERSION}"


def test_the_demo_needs_neither_repository_nor_network_and_minds_no_folder_of_another(
    installed: Installed,
) -> None:
    printed = installed.run("splitveil", "demo", "breast_cancer", "--set", "contract.epochs=1")
    assert "marvell" in printed
    assert "noisy_label" in printed
    assert "wrong" not in printed
    reports = sorted(path.parts[-3] for path in installed.here.glob("runs/*/active/report.html"))
    assert reports == [
        "breast_cancer-marvell",
        "breast_cancer-noisy_label",
        "breast_cancer-none",
        "breast_cancer-one_shot",
    ]
    for party in ("active", "passive"):
        folder = installed.here / "runs" / "breast_cancer-none" / party
        assert json.loads((folder / "summary.json").read_text())["version"] == VERSION
        opening = (folder / "transcript.jsonl").read_text().splitlines()[0]
        assert json.loads(opening)["version"] == VERSION
    report = installed.here / "runs" / "breast_cancer-none" / "active" / "report.html"
    assert re.search(rf"splitveil</t[hd]>\s*<td[^>]*>{re.escape(VERSION)}<", report.read_text())


def test_modules_are_found_under_one_name_alone(installed: Installed) -> None:
    code = "import splitveil.common, splitveil.protos as p; print(p.__file__)"
    assert Path(installed.run("python", "-c", code)).is_relative_to(installed.here.parent)


def test_type_checkers_find_no_fault_with_a_users_script(
    installed: Installed, tmp_path: Path
) -> None:
    script = str(shutil.copy(ROOT / "tests" / "support" / "users_script.py", tmp_path))
    cache = f"--cache-dir={tmp_path / 'cache'}"
    installed.run("python", "-m", "mypy", "--strict", cache, script)
    python = str(installed.bin / "python")
    installed.run("python", "-m", "pyright", "--pythonpath", python, script)
