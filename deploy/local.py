"""The command ``splitveil local``: all parties of an example as processes on this machine.

An example is a folder with ``active.yaml`` and ``passive.yaml``; with more than one passive party
it has a file for each, such as ``passive_a.yaml``.

Once all parties have ended, the report is rewritten with the figures of all parties. If more than
one defense is given, they run one after another with the same batches and the same test rows, and
the results are compared in a table and in ``<run name>-comparison.html`` in the folder of all runs.
An unfinished run resumes, and a finished one is run again; no run counts as an earlier one.
The exit code comes from the first party that fails; it is 5 if the run was ended for good, and 0 if
such a run is started again.
"""

import argparse
import hashlib
import logging
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from splitveil.common.errors import EndedForGood, SettingsError, StorageError
from splitveil.common.party.arguments import Parser, add_json, print_json
from splitveil.common.record.run_folder import has_finished
from splitveil.common.record.run_record import read_summary
from splitveil.common.run.contract import ACTIVE
from splitveil.common.settings import apply_overrides, read_yaml
from splitveil.common.text.system import num_cores
from splitveil.common.text.values import as_mapping
from splitveil.common.text.visible_text import cell, visible, visible_lines
from splitveil.common.text.wording import add_version
from splitveil.deploy.authority import PartyFolder, keep_certificates
from splitveil.deploy.overrides import (
    NamedDefense,
    Overrides,
    contract_values,
    parse_defense,
    party_kinds,
    refuse_unknown_settings,
)
from splitveil.deploy.party_processes import run_parties

WITH_SUMMARY = (0, EndedForGood.exit_code)
"""Exit codes of runs that ended as intended, including by a budget."""


PYTHON = (sys.executable, "-P")
"""Starts our own modules, even if the current folder has modules of the same name."""


_NONCE_SEED = "insecure_nonce_seed"


class EndedRun(NamedTuple):
    """A run that has ended and left its summaries."""

    folder: Path
    exit_code: int
    """0, or 5 where a budget ended it."""

    @property
    def report(self) -> Path:
        return self.folder / ACTIVE / "report.html"

    def as_json(self, title: str) -> dict[str, object]:
        folders = sorted(path.parent for path in self.folder.glob("*/summary.json"))
        return {
            "run": self.folder.name,
            "title": title,
            "folder": str(self.folder),
            "exit_code": self.exit_code,
            "report": _existing(self.report),
            "summaries": {folder.name: read_summary(folder).form() for folder in folders},
        }


def _existing(page: Path | None) -> str | None:
    return None if page is None or not page.exists() else str(page)


def run(options: argparse.Namespace) -> int:
    return run_example(options.example_dir, options)


def run_example(example_dir: Path, options: argparse.Namespace) -> int:
    kinds, runs_dir = party_kinds(example_dir), options.runs
    settings = read_yaml(example_dir / f"{ACTIVE}.yaml")
    # Divide the cores, and count no earlier runs: one person has all parties of all runs.
    threads = max(num_cores() // len(kinds), 1)
    defaults = [f"{party}.torch_threads={threads}" for party in (ACTIVE, "passive")]
    defaults += [f"{ACTIVE}.earlier_ledgers=[]"] * ("earlier_ledgers" not in settings)
    base = Overrides([*defaults, *options.overrides])
    if unknown := base.without_file(kinds):
        raise SettingsError(f"--set: {example_dir} has no file {', '.join(unknown)}.yaml")
    name = _run_name(contract_values(example_dir, settings, base.of(ACTIVE)))
    defenses = [parse_defense(text) for text in options.defense]
    if len(defenses) > 1:
        base = _sharing_batches(example_dir, kinds, name, base)
    console = Console(stderr=options.json)
    ended: dict[str, EndedRun] = {}
    plan = _plan(name, base, defenses)
    for number, (title, (own_name, overrides)) in enumerate(plan.items(), start=1):
        console.print(cell(f"run {number} of {len(plan)}: {own_name}"), soft_wrap=True)
        with held_port() as port:
            commands = _commands(example_dir, own_name, overrides, options, port)
            code = run_parties(commands, stderr=options.json, quiet=not options.verbose)
        if code == SettingsError.exit_code:
            refuse_unknown_settings(options.overrides)
        if code in WITH_SUMMARY:
            ended[title] = EndedRun(runs_dir / own_name, code)
            _try_to_write("write_report", runs_dir / own_name)
        if code:
            break
    page = None
    if len(ended) > 1 and not code:
        page = runs_dir / f"{name}-comparison.html"
        _try_to_write("write_comparison", [one.folder for one in ended.values()], page)
    if options.json and ended:
        runs = [run.as_json(title) for title, run in ended.items()]
        print_json({"name": name, "runs": runs, "comparison": _existing(page)})
    if not options.json and code in WITH_SUMMARY:
        _show(name, ended, page)
    return code


def _run_name(contract: Mapping[str, object]) -> str:
    if as_mapping(contract.get("alignment")).get("kind") == "one_sided":
        raise SettingsError(
            "contract.alignment.kind: one_sided: the active party's run needs splitveil serve "
            "passive.yaml beside it; --set contract.alignment.kind=mutual tries the same run here"
        )
    return str(contract.get("run_name"))


def _show(name: str, ended: Mapping[str, EndedRun], page: Path | None) -> None:
    # They import torch, which help does not need.
    from splitveil.active_party.report.comparison_table import comparison_table  # noqa: PLC0415
    from splitveil.passive_party.report_page import read_exposure  # noqa: PLC0415

    results = {title: read_summary(one.folder / ACTIVE) for title, one in ended.items()}
    disclosed = {}  # how much each run has given away of its passive party's columns, if known
    for title, one in ended.items():
        found = read_exposure(one.folder / "passive")
        if found is not None and found.strongest is not None:
            strongest = f"{found.strongest.name} {found.strongest_disclosure:.2f}"
            disclosed[title] = cell(f"{found.disclosure:.2f}", strongest)
    Console().print(comparison_table(name, results, disclosed))
    console = Console(soft_wrap=True, highlight=False)
    for path in filter(None, [*(one.report for one in ended.values()), page]):
        if path.exists():  # a terminal that can opens it by a click
            shown = Text(visible(str(path)), style=f"link {path.resolve().as_uri()}")
            console.print(Text("report  ").append_text(shown))


def _try_to_write(function: str, *arguments: object) -> None:
    """Write a page as the active party's command does; without it, the results are still there."""
    try:
        resolve_name(f"splitveil.active_party.report:{function}")(*arguments)  # it imports torch
    except Exception as error:
        reason = visible_lines(str(error))
        sys.stderr.write(f"splitveil local: a report could not be written: {reason}\n")


def _plan(
    name: str, base: Overrides, defenses: Sequence[NamedDefense]
) -> dict[str, tuple[str, Overrides]]:
    if not defenses:
        return {name: (name, base)}
    runs = {}
    for defense in defenses:
        own_name = name if len(defenses) == 1 else defense.run_name(name)
        overrides = base.adding(f"contract.run_name={own_name}", *defense.overrides)
        runs[defense.title] = (own_name, overrides)
    return runs


def _sharing_batches(
    example_dir: Path, kinds: Sequence[str], name: str, base: Overrides
) -> Overrides:
    """Give every run of a comparison the same joint seed, and so the same split and batches.

    The noise stays fresh. The seed follows from the example's name, so that a comparison that is
    started again resumes. Anyone could know it, which harms nobody where one person has all
    parties.
    """
    files = {kind: read_yaml(example_dir / f"{kind}.yaml") for kind in kinds}
    has_seed = any(_NONCE_SEED in one for one in files.values()) or any(
        text.startswith(f"{_NONCE_SEED}=") for kind in kinds for text in base.of(kind)
    )
    if has_seed:
        return base
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    seed = int.from_bytes(digest, "big")
    shares = (f"{kind}.{_NONCE_SEED}={seed + number}" for number, kind in enumerate(kinds))
    return base.adding(*shares)


def _commands(
    example_dir: Path, name: str, overrides: Overrides, options: argparse.Namespace, port: int
) -> dict[str, list[str]]:
    address, runs_dir = f"127.0.0.1:{port}", options.runs
    fresh = options.fresh or has_finished(runs_dir / name / ACTIVE)
    own = overrides.adding(f"active.listen={address}", f"passive.connect={address}")
    kinds = party_kinds(example_dir)
    certificates = trial_overrides(example_dir, runs_dir, {kind: own.of(kind) for kind in kinds})
    return {
        kind: [
            *(*PYTHON, "-m", f"splitveil.{kind.partition('_')[0]}_party", "run"),
            *(str(example_dir / f"{kind}.yaml"), "--runs", str(runs_dir)),
            *(["--fresh"] if fresh else []),
            *(["-v"] * (options.verbose - 1)),
            *(
                argument
                for text in [*own.of(kind), *certificates[kind]]
                for argument in ("--set", text)
            ),
        ]
        for kind in kinds
    }


@contextmanager
def held_port() -> Iterator[int]:
    """Yield a free port and keep other launchers from getting it until the run is over.

    A socket that is bound but does not listen keeps the kernel from choosing its port again. With
    SO_REUSEADDR on both sockets, the active party can still listen on this port by its number.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def parser(program: str) -> argparse.ArgumentParser:
    example = "deploy/examples/breast_cancer --defense none one_shot"
    local = Parser(prog=program, example=example)
    local.add_argument(
        "example_dir",
        type=Path,
        help="folder with active.yaml and passive.yaml, or passive_a.yaml, passive_b.yaml, ...",
    )
    add_version(local)
    add_run_arguments(local)
    return local


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--defense",
        nargs="+",
        action="extend",
        default=[],
        metavar="DEFENSE",
        help="a name (marvell), a name with settings (iso:noise_ratio=2), YAML in braces, or "
        "one_shot for a run without gradients; if more than one is given, they run one after "
        "another and are compared",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        nargs="+",
        action="extend",
        default=[],
        metavar="PARTY.NAME=VALUE",
        help="a setting to override: active.NAME=VALUE, passive.NAME=VALUE (for one passive party "
        "among several: passive_a.NAME=VALUE), contract.NAME=VALUE",
    )
    parser.add_argument(
        "--runs", type=Path, metavar="DIR", default=Path("runs"), help="folder of all runs"
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start over where a run is unfinished; its results are moved aside",
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=0,
        help="show what the parties log, and their own tables; twice for every detail",
    )
    add_json(parser)


logger = logging.getLogger(__name__)

FOLDER = ".trial-certificates"
"""Name of the certificates' folder in the folder of all runs; no run's name starts with a dot."""


def trial_overrides(
    example_dir: Path, runs_dir: Path, overrides: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Make certificates if a party's settings ask for mTLS and name files that do not exist.

    ``overrides`` are given by party's file. Returns further ones that name each party's
    certificates, which stay in ``runs_dir`` for the next call.
    """
    settings = {
        kind: apply_overrides(
            read_yaml(example_dir / f"{kind}.yaml"),
            [text for text in given if not text.startswith("contract.")],
        )
        for kind, given in overrides.items()
    }
    missing = {kind: own for kind, own in settings.items() if _has_no_certificate(own, example_dir)}
    if not missing:
        return {kind: [] for kind in settings}
    names = {}
    for kind, own in settings.items():
        party = ACTIVE if kind == ACTIVE else str(own.get("party", "passive"))
        given = contract_values(example_dir, own, overrides[kind]).get("identities")
        identities = given if isinstance(given, dict) else {}
        names[kind] = str(identities.get(party, f"{party}.splitveil")).lower()
    folder = (runs_dir / FOLDER).resolve()
    try:
        keep_certificates(folder, names)
    except StorageError as error:
        raise SettingsError(f"--runs: {error}") from error
    logger.info("certificates for this trial are in %s", folder)
    # For all parties: the others would not trust a party that keeps its own certificate.
    return {
        kind: [
            f"security.certificate={own.certificate}",
            f"security.private_key={own.private_key}",
            f"security.authority={own.authority}",
        ]
        for kind, own in ((kind, PartyFolder(folder / kind)) for kind in settings)
    }


def _has_no_certificate(settings: dict[str, Any], example_dir: Path) -> bool:
    security = settings.get("security")
    if not isinstance(security, dict) or security.get("mode", "mtls") != "mtls":
        return False
    return not (example_dir / str(security.get("certificate"))).exists()
