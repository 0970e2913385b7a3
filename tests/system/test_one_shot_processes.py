"""One-shot runs as real processes over mutual TLS: what either party writes, and what one sees.

Each run takes place twice, with tables that differ in the label of one training row.
"""

import csv
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import numpy as np
import pytest

from splitveil.protos import split_learning_pb2 as pb
from tests.support.certificates import make, use
from tests.support.processes import Party, side_by_side
from tests.support.programs import run_program
from tests.support.proxies import Call, MessageLine
from tests.support.restarts import Settings, restartable
from tests.support.runs import in_background, write_example
from tests.support.simulation import free_address

ASKED = "person-00009"
"""Whose label differs: a training row."""

NONE = Settings(
    both=("contract.exchange=one_shot", "transcript=true"),
    passive=("bottom_model={kind: pca}", "adversary=null"),
)
NOISY = Settings(
    both=(*NONE.both, "contract.release=noisy_labels"),
    active=(
        "data.label_range={low: 0, high: 8}",
        "defense={name: noisy_label, insecure_noise_seed: 7}",
    ),
    passive=("bottom_model={kind: score}", "adversary=null"),
)
SUMS = Settings(
    both=(*NONE.both, "contract.release=noisy_sums"),
    active=("defense={name: noisy_label}",),
    passive=NOISY.passive,
)


class Run(NamedTuple):
    folder: Path
    codes: tuple[int, int]
    outputs: Sequence[str]
    """Of the active party, and of the passive one, with all details."""

    pages: Sequence[str]
    """What both parties' operators saw of them, each time they looked."""

    calls: Sequence[Call]

    @property
    def run_id(self) -> bytes:
        (leave,) = (call.up[0] for call in self.calls if call.method == "Leave")
        return pb.LeaveRequest.FromString(leave).run_id.encode()

    @property
    def files(self) -> dict[str, bytes]:
        of = self.folder / "runs" / "small"
        found = (path for path in of.rglob("*") if path.is_file())
        return {str(path.relative_to(of)): path.read_bytes() for path in found}

    def columns(self, party: str) -> dict[str, list[str]]:
        with (self.folder / f"{party}.csv").open() as file:
            head, *rows = csv.reader(file)
        return {name: [row[place] for row in rows] for place, name in enumerate(head)}


def run(folder: Path, settings: Settings, *, other: bool) -> Run:
    write_example(folder, rows=160)
    table = folder / "active.csv"
    head, *lines = table.read_text().splitlines()
    cells = [line.split(",") for line in lines]
    for place, row in enumerate(cells):
        positive = (row[1] == "1") ^ (other and row[0] == ASKED)
        # Numbers that no other figure resembles, and that float32 holds.
        number = 4 * positive + (2 * place + 1) / 1024
        row[1] = str(number) if settings is NOISY else str(int(positive))
    table.write_text("\n".join([head, *map(",".join, cells), ""]))
    certificates = make(folder / "certificates")
    use(certificates, folder)
    lines_between: list[MessageLine] = []

    def between(address: str) -> MessageLine:
        lines_between.append(MessageLine(address, certificates))
        return lines_between[0]

    pages: list[str] = []
    addresses = free_address(), free_address()
    with restartable(folder, settings, between=between) as both:
        for party, address in zip(both, addresses, strict=True):
            party.start(f"status={address}", options=("-v",))
            in_background(partial(look, address, party, pages))
            if party is both.active:
                party.wait_until_says("waiting for the passive party")
        codes = both.wait()
        outputs = [one.output for one in both]
    return Run(folder, codes, outputs, pages, lines_between[0].calls)


def look(address: str, party: Party, pages: list[str]) -> None:
    while party.exit_code is None:
        with (
            suppress(OSError, HTTPException),
            urlopen(f"http://{address}/metrics", timeout=5) as page,
        ):
            pages.append(page.read().decode())
        time.sleep(0.1)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Run, Run]]:
    """Return the runs without a release and with either one, each with both labels of a row."""
    folder = tmp_path_factory.mktemp("one_shot")
    runs = side_by_side(
        *(
            partial(run, folder / f"{place}-{other}", settings, other=other)
            for place, settings in enumerate((NONE, NOISY, SUMS))
            for other in (False, True)
        )
    )
    for one in runs:
        assert one.codes == (0, 0), one.outputs
    return [(runs[place], runs[place + 1]) for place in (0, 2, 4)]


# ---- what is written ----

ACTIVATIONS = "active/checkpoint/activations.safetensors"
PREDICTIONS = "active/checkpoint/test_predictions.safetensors"


def test_no_id_and_no_number_of_a_row_is_written_but_where_the_label_owner_keeps_them(
    found: list[tuple[Run, Run]],
) -> None:
    """Nor does a line have a number for each of many rows."""
    for one in chain.from_iterable(found):
        activations = np.concatenate(list(tensors(one, "Evaluate", up=True)))
        labels = np.array(one.columns("active")["label"], np.float32)
        numbers = [activations, *tensors(one, "Train", up=False)]
        if len(set(labels)) > 2:
            numbers += [labels, labels / 8, np.array([*labels, *labels / 8], np.float64)]
        texts = {text.encode() for text in one.columns("active")["id"]}
        for party in ("active", "passive"):
            for name, cells in one.columns(party).items():
                texts |= {cell[:10].encode() for cell in cells if name not in ("id", "label")}
        texts |= {repr(float(value))[:9].encode() for each in numbers for value in each.flat}
        packed = {value.tobytes() for each in numbers for value in each.flat}
        files = one.files
        for name in (ACTIVATIONS, PREDICTIONS)[: 1 + (len(numbers) > 2)]:
            assert [value for value in packed if value in files[name]], "kept in another form"
        written = {f"output {place}": text.encode() for place, text in enumerate(one.outputs)}
        assert one.pages
        written["status"] = "\n".join(one.pages).encode()
        for name, content in (files | written).items():
            assert not [text for text in texts if text in content], name
            if name not in {ACTIVATIONS, PREDICTIONS}:
                assert not [value for value in packed if value in content], name
            if Path(name).suffix in {".json", ".jsonl"} and "checkpoint" not in name:
                lines = content.splitlines() if name.endswith("l") else [content]
                assert max(longest_list(json.loads(line)) for line in lines) <= 50, name


def tensors(one: Run, method: str, *, up: bool) -> Iterator[Any]:
    """Return the tensors of a run's calls of a method, (rows, values) each."""
    for call in one.calls:
        if call.method == method:
            frames = map(pb.TensorFrame.FromString, call.up if up else call.down)
            for frame in (each for each in frames if each.dtype == pb.DTYPE_FLOAT32):
                yield np.frombuffer(frame.data, np.float32).reshape(frame.shape)


def longest_list(value: Any) -> int:
    """Return the length of the longest list within a JSON value."""
    within = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return 0
    return max([len(value) * isinstance(value, list), *map(longest_list, within)])


# ---- what the passive party sees ----

HEARTBEAT = pb.AlignFrame(wait=pb.AlignWait()).SerializeToString()
"""Comes where the other party is at work for long."""

RANDOM = (
    rb"^\d\d:\d\d:\d\d|(?<=last link is )\w+",  # of log lines
    rb"\d{4}-\d\d-\d\d[ T][\d:.]+|[\d.]+ (s|min)\b|(?<=\"time_s\": )[\d.]+",
    rb"127\.0\.0\.1:\d+|(?<=\"last_link\": \")\w+",
)


def test_the_passive_party_sees_of_a_label_what_is_released_of_it_and_nothing_else(
    found: list[tuple[Run, Run]],
) -> None:
    """All else is the same, but for keys that are drawn at random, the run's id, and times.

    What the passive party sends after the noisy labels, or the noisy sums, has the same sizes.
    """
    none, noisy, sums = found
    assert seen_by_passive(none[0]) == seen_by_passive(none[1])
    made = {"report.html", "cover.html", "cover.json", "exposure.json", "model.safetensors"}
    assert seen_by_passive(noisy[0], made) == seen_by_passive(noisy[1], made)
    one, other = (np.concatenate(list(tensors(run, "Train", up=False))) for run in noisy)
    (moved,) = np.flatnonzero(one != other)
    assert abs(one[moved] - other[moved]) == pytest.approx(4 / 8, abs=1e-6)
    # Of the transfer everything is drawn at random, and so is the noise.
    seen, instead = (seen_by_passive(run, made, {"Evaluate", "Train"}) for run in sums)
    assert seen == instead


def seen_by_passive(
    one: Run, made: Set[str] = frozenset(), hidden: Set[str] = frozenset({"Evaluate"})
) -> dict[str, Any]:
    """Return its exit code, log, files and messages without what is random.

    A release and the activations count with their sizes alone, and files that are ``made`` of the
    release, whose numbers have other digits, with their names.
    """
    seen: dict[str, Any] = {"exit code": one.codes[1], "log": lines(one, one.outputs[1].encode())}
    for name, content in one.files.items():
        party, _, path = name.partition("/")
        file = Path(path).name
        if party == "active":
            continue
        if file.startswith("events.out"):  # a time, and nothing else, as its size shows
            seen["events"] = len(content)
        elif file == "transcript.jsonl":
            seen[path] = crossings(content)
        else:
            seen[path] = file in made or lines(one, content)
    for method, up, down, status in one.calls:
        sent = messages(one, method, up, made and hidden)
        seen[method] = status, sent, messages(one, method, down, made and {"Train"})
    return seen


def lines(one: Run, content: bytes) -> list[bytes]:
    content = content.replace(one.run_id, b"").replace(bytes(one.folder), b"")
    for random in RANDOM:
        content = re.sub(random, b"", content, flags=re.MULTILINE)
    return sorted(content.splitlines())  # several threads write them


def messages(one: Run, method: str, crossed: Sequence[bytes], hidden: Set[str]) -> list[bytes]:
    """Return messages without random values, and those of hidden methods without their tensors."""
    kept = [each for each in crossed if each != HEARTBEAT]
    if method == "Align":  # masked points, and tags and digests of them
        return [bytes(len(each)) for each in kept]
    if method in hidden:
        sizes = [len(pb.TensorFrame.FromString(each).data) for each in kept]
        kept = [each[:-size] for each, size in zip(kept, sizes, strict=True)]
    return [each.replace(one.run_id, b"") for each in kept]


def crossings(transcript: bytes) -> list[list[Any]]:
    """Return kind, place and size of the messages, each direction for itself, in its order."""
    lines = [json.loads(line) for line in transcript.splitlines()[1:]]
    parts = ("direction", "kind", "epoch", "step", "bytes")
    found = [[line[part] for part in parts] for line in lines if line["bytes"] != len(HEARTBEAT)]
    return sorted(found, key=lambda line: str(line[0]))


# ---- what a process imports ----


@pytest.mark.parametrize("settings", [NONE, SUMS], ids=["components", "score"])
def test_a_feature_owner_without_a_network_imports_no_torch(
    settings: Settings, tmp_path: Path
) -> None:
    """Neither to check nor to run, measure and report. What takes long follows when it is done."""
    write_example(tmp_path, rows=160)
    address = free_address()
    active = (*settings.both, *settings.active, f"listen={address}")
    passive = (*settings.both, *settings.passive, f"connect={address}", "max_exposure=0.99")
    with Party("active", tmp_path, *active) as other:
        for command in ("check", "run"):
            words = [command, str(tmp_path / "passive.yaml"), "--runs", str(other.runs)]
            words += [word for one in passive for word in ("--set", one)]
            done = run_program(sys.executable, "-c", f"WORDS = {words}\n{NAMING_WHAT_IS_IMPORTED}")
            assert done.returncode == 0, done.stdout
            assert done.stdout.splitlines()[-1] == "imported: []"
        assert other.wait() == 0
    early, _, late = done.stdout.partition("done: model and summary are in")
    assert "report written" in late
    assert "report written" not in early


NAMING_WHAT_IS_IMPORTED = """
import atexit, sys
heavy = ("torch", "sklearn", "scipy")
atexit.register(lambda: print("imported:", [name for name in heavy if name in sys.modules]))
from splitveil.command.program import main
main(WORDS)
"""
