"""Invalid files, or files that claim too much content: refused in one line, in bounded time.

Each is given to a party's own command. What is refused ends it with the exit code of settings (2)
or of data (3), with lines of the log and never with a traceback; nothing is waited for.
"""

import json
import os
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml
from pyarrow import parquet
from safetensors.torch import load_file, save_file

from splitveil.active_party.commands.program import main as active_main
from splitveil.common.errors import SettingsError
from splitveil.common.models.factory import build_bottom_model
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.record.model_files import save_model
from splitveil.common.text.files import read_bytes
from splitveil.common.text.yaml_text import AS_WRITTEN, MAX_DEPTH, OWN_PLAN, Extent, load_yaml
from splitveil.passive_party.commands.program import main as passive_main
from splitveil.passive_party.settings import PassiveSettings
from tests.support.commands import exit_code_of
from tests.support.runs import write_example

MAX_NODES = AS_WRITTEN.max_nodes
MARK = "bad.example"
"""In the name of every bad file, and so in the one line that refuses it."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_example(tmp_path, rows=60)
    return tmp_path


class Ended(NamedTuple):
    exit_code: int
    errors: list[str]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    def run(main: Callable[[list[str]], None], *words: object) -> Ended:
        code = exit_code_of(main, *words)
        shown = capsys.readouterr()
        assert "Traceback" not in shown.out + shown.err
        assert shown.err.replace("\n", "").isprintable()
        return Ended(code, shown.err.splitlines())

    return run


Command = Callable[..., Ended]


def check(command: Command, folder: Path, *overrides: str) -> Ended:
    sets = [word for override in overrides for word in ("--set", override)]
    return command(passive_main, "check", folder / "passive.yaml", "-q", *sets)


def refused(ended: Ended, exit_code: int, *texts: str) -> None:
    """Check that a command ended as it should, with one short line that says all of it."""
    assert ended.exit_code == exit_code, ended.errors
    assert len(ended.errors) == 1, ended.errors
    for text in texts:
        assert text in ended.errors[0]
    assert len(ended.errors[0]) < 700, ended.errors


BAD_YAML = {
    "lists 20,000 deep": 20_000 * "[" + 20_000 * "]",
    "mappings 20,000 deep": 20_000 * "{a: " + 20_000 * "}",
    "one level too many": "a: " + (MAX_DEPTH + 1) * "[" + (MAX_DEPTH + 1) * "]",
    "an integer of 6,000 digits": f"epochs: {6_000 * '9'}",
    "a hexadecimal integer of 6,000 digits": f"epochs: 0x{6_000 * 'f'}",
    "a sexagesimal number of 3,000 parts": f"epochs: 1{3_000 * ':1'}.5",
    "an alias": "a: &a [x]\nb: *a",
    "a list in itself": "a: &a [*a]",
    "more values than settings have": f"a: [{MAX_NODES * 'x,'}]",
    "a month 13": "run_name: 2024-13-01",
    "a tag of Python": "a: !!python/object/apply:os.system [ls]",
    "bytes": "a: !!binary gIGC",
    "a tag that does not fit": "a: !!bool maybe",
    "NUL": 'a: "\\0"',
    "half of a surrogate pair": 'a: "\\ud800"',
    "a character beyond Unicode": 'a: "\\UFFFFFFFF"',
    "a control character": "a: \x1b[2J",
    "more than a mebibyte": "#" + 2**20 * " ",
    "two documents": "a: 1\n---\nb: 2",
    "no YAML": "a: [b",
    "a list": "[]",
    "nothing": "",
}


@pytest.mark.parametrize("what", BAD_YAML)
def test_bad_yaml_is_refused_in_one_line(folder: Path, command: Command, what: str) -> None:
    """As a contract, which the other party has written, and as the settings themselves."""
    path = folder / f"{MARK}.yaml"
    path.write_text(BAD_YAML[what])
    settings = yaml.safe_load((folder / "passive.yaml").read_text())
    (folder / "passive.yaml").write_text(yaml.safe_dump(settings | {"contract": path.name}))
    refused(check(command, folder), 2, MARK)
    refused(command(passive_main, "run", path), 2, MARK)


@pytest.mark.parametrize("what", ["lists 20,000 deep", "a month 13", "an alias", "bytes"])
def test_an_override_is_read_like_a_file(folder: Path, command: Command, what: str) -> None:
    value = BAD_YAML[what].split(": ", 1)[-1] if "\n" not in BAD_YAML[what] else BAD_YAML[what]
    refused(check(command, folder, f"optimizer.learning_rate={value}"), 2, "--set optimizer")


def test_yaml_that_settings_need_is_read() -> None:
    text = """
    a: {b: [1, 2.5, 1.0e+3, yes, null, x, "y", "5"], c: {}, d: 0x10}
    """
    found = load_yaml(text, "")
    assert found["a"] == {"b": [1, 2.5, 1000.0, True, None, "x", "y", "5"], "c": {}, "d": 16}
    assert load_yaml("a: &a [1]\nb: *a", "", OWN_PLAN) == {"a": [1], "b": [1]}
    small = Extent(2**20, 100)
    assert len(load_yaml(f"[{99 * 'x,'}]", "", small)) == 99
    deep = load_yaml(MAX_DEPTH * "[" + MAX_DEPTH * "]", "")
    for _ in range(MAX_DEPTH - 1):
        (deep,) = deep
    assert deep == []
    with pytest.raises(SettingsError, match="at most 100 values"):
        load_yaml(f"[{100 * 'x,'}]", "", small)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("contract.cut_shape=[4611686018427387904, 4611686018427387904]", "cut_shape"),
        ("contract.cut_shape=[4097, 4096]", "cut_shape"),
        (f"contract.cut_shape=[{100 * '9'}]", "cut_shape"),
        ("bottom_model.hidden=[99999999999999999999]", "bottom_model: cannot be built"),
        ("bottom_model.hidden=[1000000000000000]", "bottom_model: cannot be built"),
    ],
)
def test_sizes_that_overflow_are_refused(
    folder: Path, command: Command, override: str, named: str
) -> None:
    refused(check(command, folder, override), 2, named)


@pytest.mark.parametrize("alignment", ["max_set_size: 40", "buckets: 2, max_set_size: 100"])
@pytest.mark.parametrize(("main", "party"), [(passive_main, "passive"), (active_main, "active")])
def test_what_ends_a_run_is_refused_by_both_parties(
    main: Any, party: str, alignment: str, folder: Path, command: Command
) -> None:
    for override, code, named in (
        ("optimizer.rates={nope: 0.1}", 2, "optimizer.rates: the model has no parameter 'nope'"),
        (f"contract.alignment={{{alignment}}}", 3, "contract.alignment.max_set_size: expected 1"),
    ):
        ended = command(main, "check", folder / f"{party}.yaml", "-q", "--set", override)
        refused(ended, code, named)


NO_UTF_8 = pa.array([b"\xff"] * 50).view(pa.string())


def parquet_with(x: object) -> Callable[[Path], None]:
    """Return what writes a table of 50 ids and this column."""
    return lambda path: parquet.write_table(
        pa.table({"id": list(map(str, range(50))), "x": x}), path
    )


def parquet_below(folder: bytes) -> Callable[[Path], None]:
    """Return what writes a table into such a folder of its own."""

    def write(path: Path) -> None:
        below = path / os.fsdecode(folder)
        below.mkdir(parents=True)
        parquet_with([1.0] * 50)(path / "rows.parquet")
        (path / "rows.parquet").rename(below / "rows.parquet")

    return write


BAD_TABLES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a header of 10 MB": ("csv", lambda p: p.write_text(5_000_000 * "a,")),
    "a name of 200,000 characters": ("csv", lambda p: p.write_text("a" * 200_000 + "\n1\n")),
    "NULs": ("csv", lambda p: p.write_bytes(bytes(100_000))),
    "NULs for Parquet": ("parquet", lambda p: p.write_bytes(bytes(100_000))),
    "cells that are not UTF-8": ("parquet", parquet_with(NO_UTF_8)),
    "levels that are not UTF-8": ("parquet", parquet_with(NO_UTF_8.dictionary_encode())),
    "a folder %ff": ("parquet", parquet_below(b"a=%ff")),
    "a folder of a byte": ("parquet", parquet_below(b"a=\xff")),
    "a footer of 8 MiB": ("parquet", lambda p: p.write_bytes(b"PAR1\xff\xff\x7fPAR1")),
}


@pytest.mark.parametrize(
    ("what", "cache"), [*((what, "") for what in BAD_TABLES), ("NULs", ", cache_dir: cache")]
)
def test_a_table_that_claims_too_much_is_refused_in_one_line(
    folder: Path, command: Command, what: str, cache: str
) -> None:
    kind, write = BAD_TABLES[what]
    write(folder / f"{MARK}.{kind}")
    source = f"{{kind: {kind}, path: {MARK}.{kind}{cache}}}"
    data = f"data={{source: {source}, id_column: id, features: {{numeric: x*}}}}"
    refused(check(command, folder, data), 3, MARK)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        before = Path.cwd()
        os.chdir(path.parent)  # the name of a socket may not be long
        try:
            server.bind(path.name)
        finally:
            os.chdir(before)


NO_FILES: dict[str, Callable[[Path], None]] = {
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": listening,
}

OPENED = {
    "csv": (3, "data.source={{kind: csv, path: {path}}}"),
    "parquet": (3, "data.source={{kind: parquet, path: {path}}}"),
    "csv with a cache": (3, "data.source={{kind: csv, path: {path}, cache_dir: cache}}"),
    "evaluation labels": (3, "adversary.labels.source.path={path}"),
    "contract": (2, "contract.run_name=x"),
    "certificate": (2, "security={{certificate: {path}, private_key: x, authority: active.csv}}"),
    "weights": (2, "initial_weights={folder}"),
}


@pytest.mark.parametrize(
    ("role", "nature"),
    [*((role, "a device") for role in OPENED), *(("csv", nature) for nature in NO_FILES)],
)
def test_what_is_no_regular_file_is_refused_at_once(
    folder: Path, command: Command, role: str, nature: str
) -> None:
    """Before a byte is read: a device never ends, and a pipe may never begin."""
    path = folder / MARK / "model.safetensors" if role == "weights" else folder / MARK
    path.parent.mkdir(exist_ok=True)
    NO_FILES[nature](path)
    if role == "contract":
        settings = yaml.safe_load((folder / "passive.yaml").read_text())
        (folder / "passive.yaml").write_text(yaml.safe_dump(settings | {"contract": MARK}))
    (folder / "x").touch(0o600)
    exit_code, override = OPENED[role]
    may_be_folder = role in {"csv", "parquet", "csv with a cache", "evaluation labels"}
    is_empty_folder = may_be_folder and nature == "a folder"
    reason = "found none" if is_empty_folder else "not a regular file"
    ended = check(command, folder, override.format(path=path, folder=path.parent))
    refused(ended, exit_code, MARK, reason)


@pytest.mark.parametrize(
    ("subcommand", "nature"),
    [("check", "a pipe"), *(("verify-transcript", nature) for nature in NO_FILES)],
)
def test_settings_or_a_transcript_that_is_no_file_is_refused_at_once(
    tmp_path: Path, command: Command, subcommand: str, nature: str
) -> None:
    NO_FILES[nature](tmp_path / MARK)
    refused(command(active_main, subcommand, tmp_path / MARK), 2, MARK, "not a regular file")


def test_a_short_file_is_read_in_little_memory_however_long_it_may_be(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"text")
    tracemalloc.start()
    try:
        assert read_bytes(path, 2**31) == b"text"
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
    assert read_bytes(path, 4) == b"text"
    with pytest.raises(OSError, match="expected at most 3 bytes"):
        read_bytes(path, 3)


def test_a_link_to_a_file_is_as_good_as_the_file(folder: Path, command: Command) -> None:
    for name in ("passive.csv", "contract.yaml"):
        (folder / name).rename(folder / f"real-{name}")
        (folder / name).symlink_to(folder / f"real-{name}")
    (folder / "linked.yaml").symlink_to(folder / "passive.yaml")
    assert command(passive_main, "check", folder / "linked.yaml", "-q").exit_code == 0


@pytest.fixture
def checkpoint(folder: Path) -> Path:
    settings = load_party_settings(PassiveSettings, folder / "passive.yaml")
    encoder = PartyData.load(settings.data, folder).fit(np.arange(40))
    assert encoder is not None
    cut_shape = settings.contract.cut_shape
    model = build_bottom_model(settings.bottom_model, encoder, cut_shape, seed=1)
    return save_model(folder, model, encoder)


Tensors = dict[str, torch.Tensor]


def with_value(value: float) -> Callable[[Tensors, str], Tensors]:
    def change(tensors: Tensors, name: str) -> Tensors:
        tensors[name].view(-1)[0] = value
        return tensors

    return change


BAD_WEIGHTS: dict[str, tuple[Callable[[Tensors, str], Tensors], str]] = {
    "NaN": (with_value(float("nan")), "holds NaN or infinity"),
    "infinity": (with_value(float("-inf")), "holds NaN or infinity"),
    "doubles": (lambda t, n: t | {n: t[n].double()}, "is float64 there and float32 in"),
    "bytes": (lambda t, n: t | {n: t[n].to(torch.float8_e4m3fn)}, "is float8_e4m3fn there"),
    "complex ones": (lambda t, n: t | {n: t[n].to(torch.complex64)}, "is complex64 there"),
    "one less": (lambda t, n: {k: v for k, v in t.items() if k != n}, "is absent there and"),
    "another shape": (lambda t, n: t | {n: t[n][None]}, "in the model of these settings"),
    "one more": (lambda t, n: t | {f"{n}s": torch.zeros(2)}, "is 2 there and absent in the model"),
}


@pytest.mark.parametrize("what", BAD_WEIGHTS)
def test_weights_of_another_kind_are_refused_by_name(
    folder: Path, command: Command, checkpoint: Path, what: str
) -> None:
    change, says = BAD_WEIGHTS[what]
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    name = max(tensors)
    assert check(command, folder, f"initial_weights={checkpoint}").exit_code == 0
    save_file(change(tensors, name), path)
    ended = check(command, folder, f"initial_weights={checkpoint}")
    named = f"{name}s" if what == "one more" else name
    refused(ended, 2, "initial_weights: ", f"tensor {named!r} ", says)


def test_weights_that_are_no_numbers_end_a_run_before_earlier_results_are_touched(
    folder: Path, command: Command, checkpoint: Path
) -> None:
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    save_file(with_value(float("nan"))(tensors, min(tensors)), path)
    words = ("run", folder / "passive.yaml", "--runs", folder / "runs", "-q")
    ended = command(passive_main, *words, "--set", f"initial_weights={checkpoint}")
    assert ended.exit_code == 2
    assert "holds NaN or infinity" in ended.errors[-1]
    assert not (folder / "runs").exists()


State = dict[str, list[dict[str, object]]]
Change = Callable[[State], str]


def changed(part: str, **values: object) -> Change:
    def change(state: State) -> str:
        state[part][0] |= values
        return json.dumps(state)

    return change


def whole(**parts: object) -> Change:
    return lambda state: json.dumps(state | parts)


BAD_ENCODERS: dict[str, Change] = {
    "lists 100,000 deep": lambda _: 100_000 * "[",
    "a text as numeric": whole(numeric="x"),
    "no scale": changed("numeric", scale=None),
    "a scale of 0": changed("numeric", scale=0.0),
    "an infinite scale": changed("numeric", scale=float("inf")),
    "half of a surrogate pair": changed("numeric", name="\ud800"),
    "a text as categories": whole(categorical=[{"name": "c", "categories": "abc"}]),
    "a shape that is a text": whole(image={"shape": "abc", "dtype": "uint8"}),
    "no UTF-8": lambda _: "\udcff",
}


@pytest.mark.parametrize("what", BAD_ENCODERS)
def test_an_encoder_that_is_none_is_refused_in_one_line(
    folder: Path, command: Command, checkpoint: Path, what: str
) -> None:
    path = checkpoint / "encoder.json"
    text = BAD_ENCODERS[what](json.loads(path.read_text()))
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    ended = check(command, folder, f"initial_weights={checkpoint}")
    refused(ended, 2, "encoder" if "feature encoder" in ended.errors[0] else "cannot be read")
