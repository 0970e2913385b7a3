"""What others build on: the versions that are allowed, pinned, locked and tested in CI."""

import re
import tomllib
from itertools import product
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.markdown import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = {
    canonicalize_name(name): version
    for name, version in re.findall(
        r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
}
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [
    Requirement(text)
    for text in (*PROJECT["dependencies"], *(t for e in EXTRAS.values() for t in e))
]
PYTHONS = sorted(
    found[1]
    for text in PROJECT["classifiers"]
    if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", text))
)
(GENERATED,) = re.findall(
    r"^# Protobuf Python Version: (\S+)$",
    (ROOT / "protos" / "split_learning_pb2.py").read_text(),
    re.MULTILINE,
)
LOWEST = "--resolution=lowest-direct"


def github() -> list[tuple[str, str, str]]:
    """Return the target, the Python and the choice of versions of each job on Linux."""
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["make"]
    runs = [step["run"] for step in job["steps"] if "run" in step]
    assert runs[-1] == "make ${{ matrix.target }}"
    assert list(job["strategy"]["matrix"]) == ["include"]  # beside axes, rows would change others
    rows = [row for row in job["strategy"]["matrix"]["include"] if "os" not in row]
    return [(row["target"], row["python"], row.get("versions", "")) for row in rows]


def gitlab() -> list[tuple[str, str, str]]:
    job = yaml.safe_load((ROOT / ".gitlab-ci.yml").read_text())["make"]
    assert job["script"][-1] == "make $TARGET"
    listed = [
        {name: value if isinstance(value, list) else [value] for name, value in row.items()}
        for row in job["parallel"]["matrix"]
    ]
    return [
        one
        for row in listed
        for one in product(row["TARGET"], row["PYTHON_VERSION"], row.get("VERSIONS", [""]))
    ]


@pytest.mark.parametrize("jobs", [github(), gitlab()], ids=["github", "gitlab"])
def test_ci_runs_every_target_every_python_and_the_lowest_versions(
    jobs: list[tuple[str, str, str]],
) -> None:
    required = re.findall(r"^make (\S+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert {target for target, _, _ in jobs} == set(required)
    assert sorted(python for target, python, v in jobs if (target, v) == ("test", "")) == PYTHONS
    assert ("test", PYTHONS[0], LOWEST) in jobs
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"


def test_macos_runs_folders_that_exist() -> None:
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["make"]
    (mac,) = (row for row in job["strategy"]["matrix"]["include"] if "os" in row)
    assert all((ROOT / folder).is_dir() for folder in mac["options"].split())


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_a_pin_is_a_version_that_is_allowed(requirement: Requirement) -> None:
    if requirement.name not in (PROJECT["name"], "setuptools"):
        assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)])


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("cryptography", "50"),  # the first without known holes, as for pyarrow
        ("pyarrow", "23.0.1"),
        ("protobuf", GENERATED),  # an older runtime refuses the generated code
    ],
)
def test_no_version_that_must_not_be_used_is_allowed(name: str, first: str) -> None:
    (requirement,) = (one for one in REQUIREMENTS if one.name == name)
    (bound,) = requirement.specifier
    assert bound.operator == ">="
    assert Version(bound.version) >= Version(first)


def test_the_lock_holds_the_pinned_versions_from_the_public_index_with_their_digests() -> None:
    lock = tomllib.loads((ROOT / "pylock.toml").read_text())
    locked = {one["name"]: one for one in lock["packages"]}
    differing = {
        n: o["version"] for n, o in locked.items() if PINS.get(n, o["version"]) != o["version"]
    }
    assert not differing, "run `make lock`"
    needed = [*PROJECT["dependencies"], *EXTRAS["serve"], *EXTRAS["sql"], *EXTRAS["ids"]]
    assert {canonicalize_name(Requirement(text).name) for text in needed} <= locked.keys()
    for package in locked.values():
        files = [*package["wheels"], *([package["sdist"]] if "sdist" in package else [])]
        for file in files:
            assert file["url"].startswith("https://files.pythonhosted.org/packages/")
            assert len(file["hashes"]["sha256"]) == 64


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (str(citation["version"]), citation["license"], citation["authors"]) == (
        PROJECT["version"],
        PROJECT["license"],
        PROJECT["authors"],
    )
    assert citation["title"].startswith(f"{PROJECT['name']}: ")


def test_pre_commit_runs_what_make_check_runs() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    programs = {hook["entry"].split()[0] for hook in repository["hooks"]}
    makefile = (ROOT / "Makefile").read_text()
    assert all(program.replace(".venv/bin", "$(BIN)") in makefile for program in programs)
