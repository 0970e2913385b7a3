"""The tutorial of two organisations: its commands are typed in two folders, one for each machine.

Blocks of commands say in their first line at whose machine they are typed. ``scp`` copies a file
into the other folder; names of hosts become this machine.
"""

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.support.commands import Done, begun, called, ended, write_tables
from tests.support.markdown import blocks
from tests.support.programs import ROOT
from tests.support.simulation import free_address

PAGE = ROOT / "docs" / "guide" / "start.md"
OWNERS = {"# at the label owner": "label-owner", "# at the feature owner": "feature-owner"}
CONNECTED = ("splitveil check --connect ", "splitveil run ")
FASTER = ("--set", "contract.batch_size=64")


class Typed(NamedTuple):
    owner: str
    text: str


def commands() -> Iterator[Typed]:
    for block in blocks(PAGE):
        owner, *lines = block.lines
        if owner in OWNERS:
            yield from (Typed(OWNERS[owner], line) for line in lines)


class Machines:
    def __init__(self, folder: Path) -> None:
        self.folders = {owner: folder / owner for owner in OWNERS.values()}
        self.done: dict[Typed, Done] = {}
        self._address = free_address()
        self._waiting: list[tuple[Typed, subprocess.Popen[str]]] = []

    def type(self, typed: Typed) -> None:
        folder, text = self.folders[typed.owner], typed.text
        for address in ("0.0.0.0:50051", "label-owner.example:50051"):
            text = text.replace(address, self._address)
        if text.startswith("scp "):
            self._copy(typed)
        elif text.startswith(CONNECTED):
            short = FASTER if " run " in text else ()
            self._waiting.append((typed, begun(folder, text, *short)))
            if len(self._waiting) == 2:
                self.done |= {one: ended(process) for one, process in self._waiting}
                self._waiting = []
        else:
            self.done[typed] = called(folder, text)

    def _copy(self, typed: Typed) -> None:
        _, source, target = shlex.split(typed.text)
        host, _, path = target.partition(":")
        owner = host.removesuffix(".example")
        assert owner != typed.owner
        shutil.copy(self.folders[typed.owner] / source, self.folders[owner] / path)
        self.done[typed] = Done(0, "")


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Machines:
    folder = tmp_path_factory.mktemp("two")
    made = Machines(folder)
    write_tables(folder)
    for owner, table in (("label-owner", "clients.csv"), ("feature-owner", "usage.csv")):
        made.folders[owner].mkdir()
        shutil.move(folder / table, made.folders[owner] / table)
    for typed in commands():
        made.type(typed)
    return made


def output_of(machines: Machines, text: str) -> str:
    (found,) = (done.output for typed, done in machines.done.items() if typed.text == text)
    return found


def test_every_command_ends_well(machines: Machines) -> None:
    assert [*machines.done] == sorted(commands(), key=[*machines.done].index)
    failed = {typed.text: done.output for typed, done in machines.done.items() if done.exit_code}
    assert failed == {}


def test_no_key_and_no_row_is_sent(machines: Machines) -> None:
    sent = [typed.text for typed in commands() if typed.text.startswith("scp ")]
    assert sent
    assert not [text for text in sent if "private_key" in text or ".csv" in text]
    keys = [path.read_bytes() for path in machines.folders["label-owner"].rglob("private_key.pem")]
    (other,) = machines.folders["feature-owner"].rglob("private_key.pem")
    assert other.read_bytes() not in keys


def test_both_screens_show_the_same_digits(machines: Machines) -> None:
    def line(text: str, name: str) -> str:
        output = output_of(machines, text)
        (found,) = (one for one in output.splitlines() if one.startswith(name))
        return found.removeprefix(name).strip()

    asked = line("splitveil certs request certificates --party passive", "public key")
    assert len(asked.replace(" ", "")) == 64
    assert line("splitveil certs show request.pem", "public key") == asked
    signed = "splitveil certs sign certificates request.pem --party passive"
    assert line(signed, "public key") == asked
    shown = "splitveil certs show certificates/passive/authority.pem"
    assert line(signed, "authority") == line(shown, "sha256")


def test_the_probe_tells_both_sides_what_the_page_shows(machines: Machines) -> None:
    page = PAGE.read_text(encoding="utf-8")
    ours = output_of(machines, "splitveil check --connect passive.yaml")
    theirs = output_of(machines, "splitveil check --connect active.yaml")
    for line in (
        "ok: contract: the active party holds the same",
        "ok: ids: 6 letters and digits with small letters at both parties",
    ):
        assert line in ours
        assert line in page
    for start in ("ok: connection: ", "ok: certificate of the active party: CN=active.splitveil ("):
        assert start in ours
        assert start in page
    assert "ok: certificate of party passive: CN=passive.splitveil (passive.splitveil)" in theirs
    assert "ok: contract: party passive holds the same" in theirs


def test_the_run_trains_on_the_common_ids_and_leaves_what_the_page_names(
    machines: Machines,
) -> None:
    for owner, party in (("label-owner", "active"), ("feature-owner", "passive")):
        results = machines.folders[owner] / "runs" / "churn-2026-03" / party
        assert (results / "checkpoint").is_dir()
        assert yaml.safe_load((results / "summary.json").read_text())["aligned_rows"] == 1200
    ours, theirs = (
        json.loads((folder / "runs" / "churn-2026-03" / party / "cover.json").read_text())
        for folder, party in zip(machines.folders.values(), ("active", "passive"), strict=True)
    )
    for name in ("run_id", "contract_sha256"):
        assert ours[name] == theirs[name] is not None
    # Of what `init` writes, a check is left to people or passes, and neither page is grey.
    answers = [{one["name"]: one["answer"] for one in facts["checks"]} for facts in (ours, theirs)]
    by_hand = {"figure", "columns", "membership", "predictions", "keys", "contract"}
    for name in answers[0].keys() - by_hand:
        given = {one[name] for one in answers} - {"other page"}
        assert given == ({"does not apply"} if name in {"sums", "rows"} else {"ticked"}), name
    # Of so few rows, a gain over the label owner's own columns is not always shown.
    assert ours["outcome"] in {"pass", "fail"} or ours["verdict"] == "No gain shown"
    assert theirs["outcome"] == "within"
    report = machines.folders["label-owner"] / "runs" / "churn-2026-03" / "active" / "report.html"
    assert report.is_file()


@pytest.mark.parametrize("party", ["active", "passive"])
def test_a_run_prints_few_lines(machines: Machines, party: str) -> None:
    output = output_of(machines, f"splitveil run {party}.yaml")
    lines = [line.partition(" INFO ")[2] for line in output.splitlines() if " INFO " in line]
    assert len(lines) <= 15, lines
    assert "rows are aligned: " in "\n".join(lines)
    assert any(line.startswith("all rows exchanged: ") for line in lines)
    if party == "active":
        assert any("none, bound on the leak AUC of the whole run: 0.500" in line for line in lines)


def test_the_plan_names_the_defense_that_init_has_chosen(machines: Machines) -> None:
    output = output_of(machines, "splitveil plan active.yaml")
    (last,) = (line for line in output.splitlines() if line.startswith("To a passive party"))
    assert last in PAGE.read_text(encoding="utf-8")
