"""Shared by both parties' commands: settings, checks, transcripts, device."""

import argparse
import hashlib
import logging
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import yaml
from rich.console import Console
from threadpoolctl import threadpool_limits

from splitveil.common.errors import SettingsError, SplitveilError
from splitveil.common.party.arguments import print_json
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_settings import PartySettings, PartySettingsT
from splitveil.common.party.workers import ONLY, Rank, facts_of, joined
from splitveil.common.record.run_folder import (
    end_of,
    has_finished,
    open_run_folder,
    write_text_atomically,
)
from splitveil.common.record.run_store import RunStore
from splitveil.common.record.transcript import Broken, Verified, compare, verify
from splitveil.common.run.contract import in_short
from splitveil.common.settings import Mark, Place, marked
from splitveil.common.text.files import why_unreadable
from splitveil.common.text.system import most_open_files, num_cores
from splitveil.common.text.visible_text import visible, visible_lines
from splitveil.common.text.yaml_text import RESOLVED, read_yaml_file

if TYPE_CHECKING:
    import torch

    from splitveil.common.models.data_parallel import Beginning, Learner
    from splitveil.common.models.ranks import Ranks

logger = logging.getLogger(__name__)

_SETTINGS = "settings.yaml"


def verify_transcript(parsed: argparse.Namespace) -> None:
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True, quiet=parsed.json)
    verified: list[Verified] = []
    files = [path for path in (parsed.transcript, parsed.against) if path is not None]
    for path in files:
        try:
            found = verify(path)
        except OSError as error:
            raise SettingsError(f"{path}: {why_unreadable(path, error)}") from error
        if isinstance(found, Broken):
            raise SplitveilError(f"{path}: line {found.line}: {found.reason}")
        verified.append(found)
        console.print(
            f"{visible(str(path))}: the chain of {found.entries:,} entries is intact; the last "
            f"link is {found.last_link}",
            markup=False,
        )
    compared = compare(*verified) if parsed.against is not None else None
    if compared is not None:
        console.print(f"{compared.agreed:,} messages were received as the other party sent them")
        for kind, count in compared.lost.items():
            line = f"{kind}: {count:,} sent but not received, as when a connection breaks"
            console.print(line, markup=False)
    if parsed.json:
        found_in = [
            {"file": str(path), "entries": found.entries, "last_link": found.last_link}
            for path, found in zip(files, verified, strict=True)
        ]
        document = None if compared is None else compared._asdict()
        print_json({"transcripts": found_in, "compared": document})
    if compared is not None and compared.unsent:
        raise SplitveilError(
            "\n".join(
                f"{kind}: {count:,} received that the other party did not record as sent"
                for kind, count in compared.unsent.items()
            )
        )


def prepare(settings: PartySettings, rank: Rank = ONLY) -> Any:
    """Set limits, the seed and the module search path; return the device as ``device_of`` does."""
    most_open_files(raised=True)
    _find_own_modules(settings)
    device = device_of(settings, rank)
    threads = settings.torch_threads or max(1, num_cores() // rank.local_size)
    if device is None:
        threadpool_limits(threads)
        return None
    import torch  # noqa: PLC0415 - a party without a network needs none

    torch.set_num_threads(threads)
    torch.manual_seed(settings.model_seed + 1_000_003 * rank.number)  # for dropout
    return device


def device_of(settings: PartySettings, rank: Rank = ONLY) -> Any:
    """Return torch's device to use; None if there is no network."""
    if not settings.has_network:
        return None
    from splitveil.common.models.device import use_device  # noqa: PLC0415 - it needs torch

    return use_device(settings.device, rank.local_rank, deterministic=settings.deterministic)


def device_in_words(device: Any) -> str:
    if device is None:
        return "cpu"
    from splitveil.common.models import device as devices  # noqa: PLC0415 - it needs torch

    return devices.device_in_words(device)


def _find_own_modules(settings: PartySettings) -> None:
    sys.path.append(str(settings.base_dir.resolve()))


def draw_nonce(settings: PartySettings) -> bytes:
    if settings.insecure_nonce_seed is None:
        return secrets.token_bytes(32)
    logger.warning(
        "insecure_nonce_seed is set: anyone who knows it knows this party's share of the joint "
        "seed. For tests only"
    )
    return hashlib.sha256(b"splitveil test nonce %d" % settings.insecure_nonce_seed).digest()


def resolved_yaml(settings: PartySettings) -> str:
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def takes_up(settings: PartySettings, *, fresh: bool, folder: Path) -> bool:
    """Return whether a folder's run is taken up, and does not make room for a new one."""
    if fresh:
        return False
    finished = has_finished(folder)
    if not finished and RunStore(folder).run() is None:
        return all(path.name == _SETTINGS for path in folder.iterdir())
    free, hidden = (marked(type(settings), one) for one in (Mark.MAY_CHANGE, Mark.HIDDEN))
    changed = [
        ".".join(place)
        + ("" if place in hidden else f": {in_short(now)} now, {in_short(then)} then")
        for place, now, then in _changes(settings.model_dump(mode="json"), stored_settings(folder))
        if place[:1] not in free
    ]
    if changed:
        raise SettingsError(
            f"{folder} has {'a finished' if finished else 'an unfinished'} "
            f"run with other settings: {'; '.join(changed)}. Expected "
            f"{'' if finished else 'the same settings, which resume it, or '}another "
            f"contract.run_name, or --fresh at both parties, which starts over; the label owner's "
            f"ledger counts what both runs release"
        )
    if not finished and end_of(folder) is None:
        logger.info("resuming the unfinished run in %s; --fresh would start over", folder)
    return True


def open_folder(
    settings: PartySettings, party: str, is_over: Callable[[Path], bool], *, fresh: bool
) -> Path | None:
    """Open a party's folder of a run, and keep its settings there; None if the run is over."""
    name = settings.contract.run_name
    folder = open_run_folder(
        settings.runs_dir, name, party, lambda one: takes_up(settings, fresh=fresh, folder=one)
    )
    if has_finished(folder):
        logger.info(
            "this run has finished, and nothing is trained; its report is %s. Another "
            "contract.run_name begins another run, and so does --fresh at both parties; the label "
            "owner's ledger counts what both runs release",
            folder / "report.html",
        )
        return None
    if is_over(folder):
        return None
    save_resolved(settings, folder)  # by its settings, the start of another run finds this one
    return folder


def stored_settings(folder: Path) -> dict[str, Any]:
    path = folder / _SETTINGS
    found = read_yaml_file(path, RESOLVED)
    if not isinstance(found, dict) or not isinstance(found.get("data"), dict):
        raise SettingsError(f"{path}: damaged: expected the settings of the run in this folder")
    return found


def _changes(now: Any, earlier: Any, *place: str) -> Iterator[tuple[Place, Any, Any]]:
    if isinstance(now, dict) and isinstance(earlier, dict):
        for name in sorted(now.keys() | earlier.keys()):
            yield from _changes(now.get(name), earlier.get(name), *place, name)
    elif now != earlier:
        yield place, now, earlier


def save_resolved(settings: PartySettings, folder: Path) -> None:
    write_text_atomically(folder / _SETTINGS, resolved_yaml(settings))


Check: TypeAlias = Callable[[], str]


def report_check(
    settings: PartySettings,
    parsed: argparse.Namespace,
    parts: Sequence[Iterable[Check]],
    details: Sequence[Check],
    then: str,
) -> None:
    """Print the outcomes of checks; a part that raises an error itself ends with it.

    Args:
        details: checks that are named only if they fail, or if all are asked for.
        then: the command that comes next.
    """
    _find_own_modules(settings)
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    console.quiet = parsed.json or parsed.quiet > 0
    if parsed.verbose:
        console.print(visible_lines(resolved_yaml(settings)), markup=False)
    failures: list[SplitveilError] = []
    outcomes: list[dict[str, object]] = []
    for part in (*parts, details):
        for found in _outcomes(part):
            outcomes.append({"ok": isinstance(found, str), "found": str(found)})
            if isinstance(found, SplitveilError):
                failures.append(found)
            elif parsed.verbose or part is not details:
                console.print(f"ok: {visible(found)}", markup=False)
    if parsed.json:
        values = settings.model_dump(mode="json")
        print_json({"ok": not failures, "checks": outcomes, "settings": values})
    if failures:
        worst = min(failures, key=lambda failure: failure.exit_code)
        raise _AllFailures(failures, worst.exit_code)
    if not parsed.verbose:
        console.print(f"ok: further checks: {len(details)} (-v names them, and all settings)")
    console.print(f"next: {visible(then)}", markup=False)


def _outcomes(part: Iterable[Check]) -> Iterator[str | SplitveilError]:
    checks = iter(part)
    while True:
        try:  # what yields the checks may fail, too
            check = next(checks, None)
            if check is None:
                return
            yield check()
        except SplitveilError as error:
            yield error


class _AllFailures(SplitveilError):
    def __init__(self, failures: Sequence[SplitveilError], exit_code: int) -> None:
        super().__init__("\n".join(dict.fromkeys(map(str, failures))))
        self.exit_code = exit_code


class Process(NamedTuple):
    """The process that is a party, with the ranks that compute for it, if there are any."""

    device: Any  # of torch; None without a network
    interruption: Interruption
    ranks: "Ranks | None" = None
    restarts: int = 0  # how often all ranks were started again

    @property
    def device_in_words(self) -> str:
        return device_in_words(self.device)


def read_data(settings: PartySettings, process: Process) -> PartyData:
    data = PartyData.of(settings)
    ids, device = data.table.id_report.in_words(), process.device_in_words
    read = (f"{len(data.ids):,}", data.table.source, ids, device)
    logger.info("%s rows read from %s, %s, device %s", *read)
    return data


def run_as_party(
    settings: PartySettingsT,
    facts: tuple[str, str],
    learner_of_rank: "Callable[[PartySettingsT, torch.device, Beginning], Learner] | None",
    take_part: Callable[[PartySettingsT, Process], None],
) -> None:
    """Take part in the run; a rank above 0 computes with rank 0 instead.

    Facts are names of this party's settings that all ranks must have in common. Only a party
    without a network has no learner.
    """
    rank = Rank.of_environment()
    device = prepare(settings, rank)
    interruption = Interruption()
    if not rank.number:
        interruption.install()
    if rank.size == 1:
        take_part(settings, Process(device, interruption, restarts=rank.restarts))
        return
    if learner_of_rank is None:
        raise SettingsError(
            "bottom_model: components of a one-shot run are computed in one process: start run "
            "without torchrun"
        )
    from splitveil.common.models.data_parallel import work  # noqa: PLC0415 - it needs torch

    with joined(rank, device, facts_of(settings, device, *facts), interruption) as ranks:
        if rank.number:
            work(ranks, lambda beginning: learner_of_rank(settings, device, beginning))
        else:
            take_part(settings, Process(device, interruption, ranks, rank.restarts))
